// Errors of failed calls, with one class for each way in which a program may react:
//
//   TwinkleError
//    ├─ RetryableError > BusyError    retry after `retryAfterMs`, if it is set; the client has already retried
//    ├─ UsageError > NotFoundError, ConflictError, StateError, QuotaError, NotSupportedError
//    ├─ AccessError                   the API key is missing, unknown, or lacks a scope
//    ├─ DeadlineError                 no response in time
//    ├─ CancelledError                the request was cancelled, by this or another authorized client
//    └─ ServerError                   a defect of the service, or data that was damaged in transit or in storage
import { type DescMessage, type MessageShape } from '@bufbuild/protobuf';
import { anyUnpack } from '@bufbuild/protobuf/wkt';
import { Code, ConnectError } from '@connectrpc/connect';
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from './gen/google/rpc/error_details_pb.js';
import type { Status } from './gen/google/rpc/status_pb.js';
import { connectionProblem, isConnectionLost } from './lost.js';

/**
 * Effect of a failed request, and whether the request may be repeated.
 *
 * - REFUSED: nothing changed; the same request fails again while the state of the server stays the same.
 * - RETRYABLE: nothing changed; the same request may succeed later.
 * - FAILED: the request was executed and failed; repeating it returns the same error.
 * - INTERRUPTED: the request may have taken effect; repeating it with the same id has no second effect.
 * - UNKNOWN: the request may have taken effect; check the state before sending another request.
 */
export type Disposition = 'REFUSED' | 'RETRYABLE' | 'FAILED' | 'INTERRUPTED' | 'UNKNOWN';

/** An invalid field of the request. */
export interface FieldViolation {
  /** Path, such as `operation.forward_backward.batch.features[2].labels`. */
  readonly field: string;
  readonly problem: string;
}

/** Properties of a failed call. */
export interface ErrorFacts {
  readonly code: Code;
  readonly rawMessage: string;
  readonly reason?: string;
  readonly metadata?: Readonly<Record<string, string>>;
  readonly violations?: readonly FieldViolation[];
  readonly requestId?: string;
  readonly retryAfterMs?: number | undefined;
  /** Disposition that the server sent; undefined if it sent none. */
  readonly disposition?: Disposition | undefined;
}

const DISPOSITIONS: readonly string[] = ['REFUSED', 'RETRYABLE', 'FAILED', 'INTERRUPTED', 'UNKNOWN'];
/** Dispositions for servers that send none. Other codes mean UNKNOWN. See disposition.proto. */
const BY_CODE: Partial<Record<Code, Disposition>> = {
  [Code.InvalidArgument]: 'REFUSED',
  [Code.DeadlineExceeded]: 'INTERRUPTED',
  [Code.NotFound]: 'REFUSED',
  [Code.AlreadyExists]: 'REFUSED',
  [Code.PermissionDenied]: 'REFUSED',
  [Code.ResourceExhausted]: 'REFUSED',
  [Code.FailedPrecondition]: 'FAILED',
  [Code.Unimplemented]: 'REFUSED',
  [Code.Unavailable]: 'INTERRUPTED',
  [Code.Unauthenticated]: 'REFUSED',
};

/** Name of a status code in the contracts, such as "NOT_FOUND". */
export const codeName = (code: Code): string =>
  code === Code.Canceled ? 'CANCELLED' : Code[code].replace(/(?<=[a-z])(?=[A-Z])/g, '_').toUpperCase();

/** A call failed. `message` is for people; the other properties are for programs. */
export class TwinkleError extends Error {
  /** Status code of the call. */
  readonly code: Code;
  /** The server's description of the problem, without reason and request id. */
  readonly rawMessage: string;
  /** Name of an `ErrorReason` without its prefix; empty if the transport failed. */
  readonly reason: string;
  /** Details of the reason by name, such as `adapterId`. */
  readonly metadata: Readonly<Record<string, string>>;
  /** Invalid fields of the request. */
  readonly violations: readonly FieldViolation[];
  /** Id of the call, which helps the operator to find it in the logs. */
  readonly requestId: string;
  /** Time after which to retry; undefined if the server did not specify one. */
  readonly retryAfterMs: number | undefined;
  /** Whether the request took effect and may be repeated, as reported by the server or else implied by `code`. */
  readonly disposition: Disposition;

  constructor(facts: ErrorFacts, options?: ErrorOptions) {
    super(describe(facts), options);
    this.name = new.target.name;
    this.code = facts.code;
    this.rawMessage = facts.rawMessage;
    this.reason = facts.reason ?? '';
    this.metadata = facts.metadata ?? {};
    this.violations = facts.violations ?? [];
    this.requestId = facts.requestId ?? '';
    this.retryAfterMs = facts.retryAfterMs;
    this.disposition = facts.disposition ?? impliedDisposition(facts);
  }

  /** Whether the client repeats the request: its disposition allows it, and its deadline has not passed. */
  get isRepeatable(): boolean {
    const isTransient = this.disposition === 'RETRYABLE' || this.disposition === 'INTERRUPTED';
    return isTransient && this.code !== Code.DeadlineExceeded;
  }
}

/** The service cannot serve the request now; the same request may succeed later. */
export class RetryableError extends TwinkleError {}
/** A queue is full, or a rate limit is reached; retry after `retryAfterMs`. */
export class BusyError extends RetryableError {}
/** The request cannot succeed without a change. */
export class UsageError extends TwinkleError {}
/** The caller has no such resource. */
export class NotFoundError extends UsageError {}
/** The id, name or number is in use, or another writer changed the resource first. */
export class ConflictError extends UsageError {}
/** The call requires another state; the message names the required earlier step. */
export class StateError extends UsageError {}
/** A quota or size limit is reached, and waiting alone does not help. */
export class QuotaError extends UsageError {}
/** The method is in the contract, but this server does not implement it. */
export class NotSupportedError extends UsageError {}
/** The credentials are missing, unknown, or lack a scope. */
export class AccessError extends TwinkleError {}
/** The deadline passed before a response arrived. The request may still complete. */
export class DeadlineError extends TwinkleError {}
/** This client or another authorized client cancelled the request. */
export class CancelledError extends TwinkleError {}
/** The service has a defect, or data was damaged in transit or in storage. */
export class ServerError extends TwinkleError {}

const CLASSES: Partial<Record<Code, typeof TwinkleError>> = {
  [Code.Unavailable]: RetryableError,
  [Code.ResourceExhausted]: QuotaError,
  [Code.InvalidArgument]: UsageError,
  [Code.OutOfRange]: UsageError,
  [Code.NotFound]: NotFoundError,
  [Code.AlreadyExists]: ConflictError,
  [Code.Aborted]: ConflictError,
  [Code.FailedPrecondition]: StateError,
  [Code.Unimplemented]: NotSupportedError,
  [Code.Unauthenticated]: AccessError,
  [Code.PermissionDenied]: AccessError,
  [Code.DeadlineExceeded]: DeadlineError,
  [Code.Canceled]: CancelledError,
};

/** Where an error arose. */
export interface ErrorContext {
  /** Id of the call, used if the server reported none. */
  readonly requestId?: string;
  /** Signal with which this client can cancel the call. */
  readonly signal?: AbortSignal | undefined;
}

/** Returns the error of a failed call. Errors of this package are returned unchanged. */
export function errorFrom(reason: unknown, context: ErrorContext = {}): TwinkleError {
  if (reason instanceof TwinkleError) {
    return reason;
  }
  const failed = ConnectError.from(reason);
  const facts = factsOf((schema) => failed.findDetails(schema)[0]);
  const requestId = failed.metadata.get('x-request-id') ?? context.requestId ?? '';
  if (context.signal?.aborted && !facts.reason) {
    const isTimeout = context.signal.reason instanceof Error && context.signal.reason.name === 'TimeoutError';
    const code = isTimeout ? Code.DeadlineExceeded : Code.Canceled;
    return build({ code, rawMessage: failed.rawMessage, requestId }, failed);
  }
  const problem = facts.reason ? '' : connectionProblem(failed);
  if (problem) {
    return new UsageError(
      { code: Code.Unavailable, rawMessage: problem, requestId, disposition: 'REFUSED' },
      { cause: failed },
    );
  }
  const isLost = !facts.reason && isConnectionLost(failed);
  return build(
    { ...facts, requestId, code: isLost ? Code.Unavailable : failed.code, rawMessage: failed.rawMessage },
    failed,
  );
}

/** Returns the error that a status describes, such as `OperationResult.outcome`. */
export function errorFromStatus(status: Status, requestId = ''): TwinkleError {
  const facts = factsOf((schema) => {
    for (const detail of status.details) {
      const message = anyUnpack(detail, schema);
      if (message) {
        return message;
      }
    }
    return undefined;
  });
  const code = status.code in Code ? (status.code as Code) : Code.Unknown;
  return build({ ...facts, requestId, code, rawMessage: status.message }, undefined);
}

type Finder = <D extends DescMessage>(schema: D) => MessageShape<D> | undefined;

function factsOf(find: Finder): Omit<ErrorFacts, 'code' | 'rawMessage' | 'requestId'> {
  const info = find(ErrorInfoSchema);
  const delay = find(RetryInfoSchema)?.retryDelay;
  const { disposition = '', ...metadata } = info?.metadata ?? {};
  return {
    reason: info?.reason.replace(/^ERROR_REASON_/, '') ?? '',
    metadata,
    violations: (find(BadRequestSchema)?.fieldViolations ?? []).map((item) => ({
      field: item.field,
      problem: item.description,
    })),
    retryAfterMs: delay && 1000 * Number(delay.seconds) + delay.nanos / 1e6,
    disposition: isDisposition(disposition) ? disposition : undefined,
  };
}

const isDisposition = (name: string): name is Disposition => DISPOSITIONS.includes(name);

function build(facts: ErrorFacts, cause: ConnectError | undefined): TwinkleError {
  const isBusy = facts.code === Code.ResourceExhausted && facts.retryAfterMs !== undefined;
  const kind = isBusy ? BusyError : (CLASSES[facts.code] ?? ServerError);
  return new kind(facts, cause && { cause });
}

function impliedDisposition({ code, retryAfterMs }: ErrorFacts): Disposition {
  if (code === Code.ResourceExhausted && retryAfterMs !== undefined) {
    return 'RETRYABLE';
  }
  return BY_CODE[code] ?? 'UNKNOWN';
}

function describe(facts: ErrorFacts): string {
  const text = facts.rawMessage || codeName(facts.code);
  const fields = (facts.violations ?? []).filter(({ field }) => !text.includes(field));
  const parts = [text, ...fields.map(({ field, problem }) => `${field}: ${problem}`)];
  const request = facts.requestId ? `, request ${facts.requestId}` : '';
  return `${parts.join('; ')} [${facts.reason || codeName(facts.code)}${request}]`;
}
