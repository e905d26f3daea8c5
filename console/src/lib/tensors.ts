// Elements of tensors. All types are little-endian.
import { create } from '@bufbuild/protobuf';
import { Dtype, type Tensor, TensorSchema } from '../gen/twinkle/api/tensor/v1/tensor_pb';

/** Elements of an int32 or float32 tensor. */
export function elements(tensor: Tensor | undefined): number[] {
  if (!tensor) {
    return [];
  }
  const view = new DataView(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength);
  const read = tensor.dtype === Dtype.FLOAT32 ? view.getFloat32 : view.getInt32;
  return Array.from({ length: view.byteLength / 4 }, (_, index) => read.call(view, 4 * index, true));
}

export function int32Tensor(values: number[]): Tensor {
  const view = new DataView(new ArrayBuffer(4 * values.length));
  values.forEach((value, index) => view.setInt32(4 * index, value, true));
  return create(TensorSchema, {
    dtype: Dtype.INT32,
    shape: [BigInt(values.length)],
    data: new Uint8Array(view.buffer),
  });
}
