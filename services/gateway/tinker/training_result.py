"""The outcome of a forward or forward-backward pass in Tinker's words: protobuf, or JSON for older clients."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from services.gateway.tinker.arrays import Array, array_to_json
from services.gateway.tinker.wire import tinker_pb2 as wire
from services.kit.rpc.tensors import tensor_data_from_proto
from twinkle.api.model.v1 import operation_result_pb2

OUTPUT_TYPE = 'ArrayRecord'
_FIELD = 'logprobs'


def output_to_proto(result: operation_result_pb2.ForwardResult) -> wire.ForwardBackwardOutput:
    """Return the outcome as a message; a record holds examples in a row whose trailing dimensions are the same."""
    output = wire.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE, metrics=metrics_of(result))
    for trailing_shape, arrays in groupby(_logprobs(result), key=lambda array: array.shape[1:]):
        group = list(arrays)
        record = output.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(group))
        record.fields[_FIELD].CopyFrom(_batched(group, trailing_shape))
    return output


def output_to_json(result: operation_result_pb2.ForwardResult) -> dict[str, Any]:
    """Return the outcome as a JSON document."""
    return {
        'loss_fn_output_type': OUTPUT_TYPE,
        'loss_fn_outputs': [{_FIELD: array_to_json(array)} for array in _logprobs(result)],
        # JSON has no other numbers, and clients take nothing else there.
        'metrics': {name: value for name, value in metrics_of(result).items() if math.isfinite(value)},
    }


def metrics_of(result: operation_result_pb2.ForwardResult) -> dict[str, float]:
    """Return the numbers of a pass as `name:reduction`: clients that split a batch put the parts together by it."""
    reported = {_metric_name(name): value for name, value in result.metrics.items()}
    own = {'loss:sum': result.loss, 'num_tokens:sum': float(result.label_count)}
    return {**reported, **own}


def _metric_name(name: str) -> str:
    return name if name.count(':') == 1 else f'{name.replace(":", "_")}:mean'


def _logprobs(result: operation_result_pb2.ForwardResult) -> Iterator[Array]:
    for index, tensor in enumerate(result.logprobs):
        yield tensor_data_from_proto(tensor, f'logprobs[{index}]').to_numpy().astype('<f4')


def _batched(arrays: Sequence[Array], trailing_shape: tuple[int, ...]) -> wire.BatchedTensor:
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype='<i8')
    return wire.BatchedTensor(
        data=b''.join(array.tobytes() for array in arrays),
        offsets=offsets.tobytes(),
        dtype=wire.DTYPE_FLOAT32,
        trailing_shape=trailing_shape,
    )
