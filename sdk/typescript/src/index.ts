// Client of Twinkle for Node.js and browsers. The messages and services of the contracts are in `twinkle-grpc/api/...`.
export { Code } from '@connectrpc/connect';
export type { CallOptions, Client, Interceptor } from '@connectrpc/connect';
export type { Retry } from './backoff.js';
export { type ClientOptions, DEFAULT_RETRY_TIMEOUT_MS, TwinkleClient } from './client.js';
export {
  AccessError,
  BusyError,
  CancelledError,
  codeName,
  ConflictError,
  DeadlineError,
  type Disposition,
  errorFrom,
  errorFromStatus,
  type FieldViolation,
  NotFoundError,
  NotSupportedError,
  QuotaError,
  RetryableError,
  ServerError,
  StateError,
  TwinkleError,
  UsageError,
} from './errors.js';
export { newId } from './ids.js';
export { type Completion, type SampleInit } from './sampling.js';
export { elements, type Example, float32Tensor, int32Tensor, NO_LABEL, supervisedBatch } from './tensors.js';
export { AdapterHandle, type VerbInit, type VerbName } from './training.js';
