// The error of a failed call, with the server's message.
import { Code, codeName, errorFrom } from 'twinkle-grpc';

export interface Failure {
  message: string;
  /** Name of the reason, such as "QUOTA_EXCEEDED". Empty if the server named none. */
  reason: string;
  /** Path of the invalid field. Empty if the error concerns no field. */
  field: string;
  /** Status code of the call, such as "NOT_FOUND", or the HTTP status of a route of the console. */
  code: string;
  /** Id of the call in the logs of the services. Empty if the server sent none. */
  requestId: string;
}

/** An error that the console's own HTTP routes returned. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly reason: string,
    readonly field: string,
    readonly requestId: string,
  ) {
    super(message);
  }
}

export function failureOf(error: unknown): Failure {
  if (error instanceof ApiError) {
    const { message, reason, field, requestId } = error;
    return { message, reason, field, code: `${error.status}`, requestId };
  }
  const failed = errorFrom(error);
  return {
    message: failed.rawMessage || 'The server did not respond. Check that the gateway is running.',
    reason: failed.reason,
    field: failed.violations[0]?.field ?? failed.metadata['field'] ?? '',
    code: codeName(failed.code),
    requestId: failed.metadata['requestId'] ?? failed.requestId,
  };
}

export const hasReason = (error: unknown, reason: string): boolean => failureOf(error).reason === reason;

export const isAborted = (error: unknown): boolean =>
  errorFrom(error).code === Code.Canceled || (error instanceof DOMException && error.name === 'AbortError');
