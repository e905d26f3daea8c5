import { create } from '@bufbuild/protobuf';
import { anyPack } from '@bufbuild/protobuf/wkt';
import { Code, ConnectError } from '@connectrpc/connect';
import { describe, expect, test } from 'vitest';
import * as errors from '../src/errors.js';
import { ErrorInfoSchema } from '../src/gen/google/rpc/error_details_pb.js';
import { StatusSchema } from '../src/gen/google/rpc/status_pb.js';
import { refusal } from './fakes.js';

const { errorFrom } = errors;

test('an error has the details of the server', () => {
  const error = errorFrom(
    refusal(Code.InvalidArgument, 'a value is wrong', {
      reason: 'ERROR_REASON_INVALID_FIELD',
      disposition: 'REFUSED',
      field: 'params.top_k',
      requestId: 'rq-7',
    }),
  );
  expect(error).toBeInstanceOf(errors.UsageError);
  expect(error.name).toBe('UsageError');
  expect(error.message).toBe('a value is wrong; params.top_k: must be positive [INVALID_FIELD, request rq-7]');
  expect(error.rawMessage).toBe('a value is wrong');
  expect(error.reason).toBe('INVALID_FIELD');
  expect(error.metadata).toEqual({ adapterId: 'ad-1' });
  expect(error.violations).toEqual([{ field: 'params.top_k', problem: 'must be positive' }]);
  expect(error.requestId).toBe('rq-7');
  expect(error.disposition).toBe('REFUSED');
});

test('a field that the message names is not repeated', () => {
  const error = errorFrom(refusal(Code.InvalidArgument, 'top_k: must be positive', { field: 'top_k' }));
  expect(error.message).toBe('top_k: must be positive [SOME_REASON]');
});

test.each([
  [Code.NotFound, errors.NotFoundError, 'REFUSED', false],
  [Code.AlreadyExists, errors.ConflictError, 'REFUSED', false],
  [Code.FailedPrecondition, errors.StateError, 'FAILED', false],
  [Code.ResourceExhausted, errors.QuotaError, 'REFUSED', false],
  [Code.Unimplemented, errors.NotSupportedError, 'REFUSED', false],
  [Code.Unauthenticated, errors.AccessError, 'REFUSED', false],
  [Code.DeadlineExceeded, errors.DeadlineError, 'INTERRUPTED', false],
  [Code.Unavailable, errors.RetryableError, 'INTERRUPTED', true],
  [Code.Internal, errors.ServerError, 'UNKNOWN', false],
  [Code.DataLoss, errors.ServerError, 'UNKNOWN', false],
])('the code %i decides without a disposition of the server', (code, kind, disposition, isRepeatable) => {
  const error = errorFrom(refusal(code, 'refused'));
  expect(error.constructor).toBe(kind);
  expect(error.disposition).toBe(disposition);
  expect(error.isRepeatable).toBe(isRepeatable);
});

test.each([
  [Code.Unavailable, 'FAILED', false],
  [Code.Unavailable, 'UNKNOWN', false],
  [Code.Aborted, 'RETRYABLE', true],
  [Code.DataLoss, 'INTERRUPTED', true],
  [Code.DeadlineExceeded, 'RETRYABLE', false],
])('the disposition of the server decides whether code %i (%s) is repeated', (code, disposition, isRepeatable) => {
  expect(errorFrom(refusal(code, 'refused', { disposition })).isRepeatable).toBe(isRepeatable);
});

test('a full queue has a retry time', () => {
  const error = errorFrom(refusal(Code.ResourceExhausted, 'full', { retrySeconds: 2n }));
  expect(error).toBeInstanceOf(errors.BusyError);
  expect(error.retryAfterMs).toBe(2500);
  expect(error.isRepeatable).toBe(true);
});

describe('failures of the connection', () => {
  const caused = (code: Code, cause: unknown): ConnectError => {
    const error = new ConnectError('failed', code);
    error.cause = cause;
    return error;
  };
  const system = (code: string): Error => Object.assign(new Error(code), { code });

  test.each([
    new ConnectError('the stream was cancelled', Code.Canceled),
    new ConnectError('read ECONNRESET', Code.Aborted),
    caused(Code.Internal, system('ERR_HTTP2_STREAM_ERROR')),
    new ConnectError('Failed to fetch', Code.Unknown),
    new ConnectError('missing trailer', Code.Internal),
  ])('$message may be repeated', (failure) => {
    const error = errorFrom(failure);
    expect(error).toBeInstanceOf(errors.RetryableError);
    expect(error.code).toBe(Code.Unavailable);
    expect(error.isRepeatable).toBe(true);
  });

  test('a defect of the program is not a lost connection', () => {
    expect(errorFrom(new TypeError('x is undefined'))).toBeInstanceOf(errors.ServerError);
  });

  test('an untrusted certificate is explained and not repeated', () => {
    const error = errorFrom(caused(Code.Internal, new Error('failed', { cause: system('SELF_SIGNED_CERT_IN_CHAIN') })));
    expect(error).toBeInstanceOf(errors.UsageError);
    expect(error.message).toContain('TWINKLE_CA');
    expect(error.isRepeatable).toBe(false);
  });

  test('a call that this client cancels is not repeated', () => {
    const stopped = AbortSignal.abort(new Error('enough'));
    const error = errorFrom(new ConnectError('enough', Code.Unknown), { signal: stopped });
    expect(error).toBeInstanceOf(errors.CancelledError);
    expect(error.isRepeatable).toBe(false);
  });

  test('a signal with a timeout is a deadline', () => {
    const expired = AbortSignal.abort(new DOMException('too late', 'TimeoutError'));
    expect(errorFrom(expired.reason, { signal: expired })).toBeInstanceOf(errors.DeadlineError);
  });
});

test('the status in a result is an error like that of a call', () => {
  const info = create(ErrorInfoSchema, { reason: 'LOSS_NOT_FINITE', metadata: { disposition: 'FAILED', step: '3' } });
  const status = create(StatusSchema, {
    code: Code.FailedPrecondition,
    message: 'the loss is NaN',
    details: [anyPack(ErrorInfoSchema, info)],
  });
  const error = errors.errorFromStatus(status, 'rq-1');
  expect(error).toBeInstanceOf(errors.StateError);
  expect(error.message).toBe('the loss is NaN [LOSS_NOT_FINITE, request rq-1]');
  expect(error.metadata).toEqual({ step: '3' });
});

test('names of codes are those of the contracts', () => {
  expect([Code.NotFound, Code.Canceled, Code.InvalidArgument].map(errors.codeName)).toEqual([
    'NOT_FOUND',
    'CANCELLED',
    'INVALID_ARGUMENT',
  ]);
});
