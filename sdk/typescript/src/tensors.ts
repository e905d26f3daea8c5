// Tensors of the contracts. All types are little-endian.
import { create } from '@bufbuild/protobuf';
import { type FeatureBatch, FeatureBatchSchema } from './gen/twinkle/api/data/v1/input_feature_pb.js';
import { Dtype, type Tensor, TensorSchema } from './gen/twinkle/api/tensor/v1/tensor_pb.js';

/** Label of a position that has none. */
export const NO_LABEL = -100;

/** Returns the elements of an int32 or float32 tensor; an unset tensor has none. */
export function elements(tensor: Tensor | undefined): number[] {
  if (!tensor) {
    return [];
  }
  if (tensor.dtype !== Dtype.FLOAT32 && tensor.dtype !== Dtype.INT32) {
    throw new TypeError(`the tensor has the type ${Dtype[tensor.dtype]}; only INT32 and FLOAT32 can be read`);
  }
  const view = new DataView(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength);
  const read = tensor.dtype === Dtype.FLOAT32 ? view.getFloat32 : view.getInt32;
  return Array.from({ length: view.byteLength / 4 }, (_, index) => read.call(view, 4 * index, true));
}

/** Returns an int32 tensor with one dimension, such as token ids or labels. */
export function int32Tensor(values: readonly number[]): Tensor {
  return tensor(Dtype.INT32, values, (view, offset, value) => view.setInt32(offset, value, true));
}

/** Returns a float32 tensor with one dimension, such as loss weights or advantages. */
export function float32Tensor(values: readonly number[]): Tensor {
  return tensor(Dtype.FLOAT32, values, (view, offset, value) => view.setFloat32(offset, value, true));
}

/** One training example: tokens, and the positions whose tokens are learned. */
export interface Example {
  readonly tokenIds: readonly number[];
  /** Number of tokens at the beginning that are not learned, such as those of the prompt. Defaults to 0. */
  readonly promptLength?: number;
}

/**
 * Returns a batch for the verbs that train on tokens. Labels are shifted, as the contract requires: the label of a
 * position is the next token.
 */
export function supervisedBatch(examples: readonly Example[]): FeatureBatch {
  return create(FeatureBatchSchema, {
    features: examples.map(({ tokenIds, promptLength = 0 }) => ({
      inputIds: int32Tensor(tokenIds),
      labels: int32Tensor(
        tokenIds.map((_, index) => (index + 1 < promptLength ? NO_LABEL : (tokenIds[index + 1] ?? NO_LABEL))),
      ),
    })),
  });
}

function tensor(
  dtype: Dtype,
  values: readonly number[],
  write: (view: DataView, offset: number, value: number) => void,
): Tensor {
  const view = new DataView(new ArrayBuffer(4 * values.length));
  values.forEach((value, index) => write(view, 4 * index, value));
  return create(TensorSchema, { dtype, shape: [BigInt(values.length)], data: new Uint8Array(view.buffer) });
}
