import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import { OperationResultSchema } from 'twinkle-grpc/api/model/v1/operation_result_pb';
import { rowOf, sharingOf } from './receipts';

const forward = (number: bigint, adapters: number, queueNanos: number) =>
  create(OperationResultSchema, {
    sequenceNumber: number,
    outcome: { case: 'forward', value: { loss: 0.5, labelCount: 12n } },
    receipt: {
      tokenCount: 40n,
      passCount: 1,
      passAdapterCount: adapters,
      queueTime: { nanos: queueNanos },
      deviceTime: { nanos: 250_000_000 },
    },
  });

test('a row has the outcome and the receipt of an operation', () => {
  expect(rowOf(forward(3n, 2, 750_000_000))).toMatchObject({
    number: 3,
    kind: 'forward',
    detail: 'loss 0.5 over 12 labels',
    tokenCount: 40,
    queueSeconds: 0.75,
    deviceSeconds: 0.25,
    passAdapterCount: 2,
  });
});

test('the row of a failed operation has the message of the error', () => {
  const failed = create(OperationResultSchema, { outcome: { case: 'error', value: { code: 9, message: 'too far' } } });
  expect(rowOf(failed)).toMatchObject({ kind: 'error', error: 'too far' });
});

test('sharing counts only operations with passes', () => {
  const saved = create(OperationResultSchema, { outcome: { case: 'save', value: {} } });
  const rows = [forward(1n, 2, 750_000_000), forward(2n, 1, 0), saved].map(rowOf);
  expect(sharingOf(rows)).toMatchObject({ operationCount: 2, coBatched: 0.5, queued: 0.6 });
  expect(sharingOf([rowOf(saved)])).toBeUndefined();
});
