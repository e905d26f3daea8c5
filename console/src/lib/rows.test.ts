import { create, type MessageInitShape } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import { PeekedRowSchema } from 'twinkle-grpc/api/data/v1/dataset_service_pb';
import { rowOf } from './rows';
import { int32Tensor } from 'twinkle-grpc';

const row = (init: MessageInitShape<typeof PeekedRowSchema>) => rowOf(create(PeekedRowSchema, init));

test('a token is trained if the label of its predecessor is set', () => {
  const feature = { inputIds: int32Tensor([5, 6, 7]), labels: int32Tensor([-100, 7, -100]) };
  expect(row({ index: 3n, feature })).toMatchObject({
    index: 3,
    encoded: { ids: [5, 6, 7], isTrained: [false, false, true] },
  });
});

test('tokens without labels are not trained', () => {
  expect(row({ feature: { inputIds: int32Tensor([5, 6]) } }).encoded?.isTrained).toEqual([false, false]);
});

test('a row without tokens is not encoded', () => {
  expect(row({ columns: { text: 'a' } })).toEqual({
    index: 0,
    columns: { text: 'a' },
    encoded: undefined,
    problem: '',
  });
});
