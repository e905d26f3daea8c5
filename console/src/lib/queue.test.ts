import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import { GetOperationResponseSchema, OperationState } from 'twinkle-grpc/api/model/v1/training_service_pb';
import { queueText } from './queue';

test('a queued operation has its position and the estimated wait', () => {
  const next = { state: OperationState.QUEUED, queuePosition: 3, estimatedWait: { seconds: 4n } };
  expect(queueText(create(GetOperationResponseSchema, next), 8n)).toBe('3 ahead in the queue, about 4 s');
  expect(queueText(create(GetOperationResponseSchema, { ...next, estimatedWait: undefined }), 8n)).toBe(
    '3 ahead in the queue',
  );
});

test('a running operation has its number', () => {
  expect(queueText(create(GetOperationResponseSchema, { state: OperationState.RUNNING }), 8n)).toBe(
    'operation 8 is running',
  );
});
