// The error of a failed call, with the server's message.
import { Code, ConnectError } from '@connectrpc/connect';
import { BadRequestSchema, ErrorInfoSchema } from '../gen/google/rpc/error_details_pb';

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

const codeName = (code: Code): string => Code[code].replace(/(?<=[a-z])(?=[A-Z])/g, '_').toUpperCase();

export function failureOf(error: unknown): Failure {
  if (error instanceof ApiError) {
    const { message, reason, field, requestId } = error;
    return { message, reason, field, code: `${error.status}`, requestId };
  }
  const failed = ConnectError.from(error);
  const info = failed.findDetails(ErrorInfoSchema)[0];
  const violation = failed.findDetails(BadRequestSchema)[0]?.fieldViolations[0];
  return {
    message: failed.rawMessage || 'The server did not respond. Check that the gateway is running.',
    reason: info?.reason.replace(/^ERROR_REASON_/, '') ?? '',
    field: violation?.field ?? info?.metadata['field'] ?? '',
    code: codeName(failed.code),
    requestId: info?.metadata['requestId'] ?? failed.metadata.get('x-request-id') ?? '',
  };
}

export const hasReason = (error: unknown, reason: string): boolean => failureOf(error).reason === reason;

export const isAborted = (error: unknown): boolean =>
  ConnectError.from(error).code === Code.Canceled || (error instanceof DOMException && error.name === 'AbortError');
