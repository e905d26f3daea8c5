"""Responses for finished training futures: protobuf, or JSON for older clients."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from services.gateway.http.call import JsonResponse, Response
from services.gateway.tinker.arrays import Array, array_to_json
from services.gateway.tinker.futures import Outcome, ProtobufResponse, ResultFormat, Verb
from services.gateway.tinker.wire import tinker_pb2 as wire
from services.kit.rpc.tensors import tensor_data_from_proto
from twinkle.api.model.v1 import operation_result_pb2, training_service_pb2

OUTPUT_TYPE = 'ArrayRecord'
_FIELD = 'logprobs'


def training_formats() -> Mapping[str, ResultFormat]:
    """Return the response format of each training verb."""
    return {
        Verb.CREATE_MODEL: _created,
        Verb.LOAD_MODEL: _loaded,
        Verb.LOAD_WEIGHTS: _loaded,
        Verb.FORWARD: _passed,
        Verb.FORWARD_BACKWARD: _passed,
        Verb.OPTIM_STEP: _stepped,
        Verb.SAVE_WEIGHTS: _saved,
        Verb.SAVE_FOR_SAMPLER: _saved,
        Verb.SAVE_EXTERNAL: _saved,
        Verb.PUBLISH: _published,
        Verb.UNLOAD_MODEL: _unloaded,
    }


async def _created(outcome: Outcome) -> Response:
    return JsonResponse({'model_id': outcome.future.lane, 'type': 'create_model'})


async def _loaded(outcome: Outcome) -> Response:
    facts = {'path': outcome.note.facts.get('path'), 'model_id': outcome.future.lane}
    return JsonResponse({**facts, 'type': 'load_weights'})


async def _passed(outcome: Outcome) -> Response:
    return await asyncio.to_thread(_pass_response, outcome)


def _pass_response(outcome: Outcome) -> Response:
    result = _result_of(outcome).forward
    if outcome.is_protobuf_accepted:
        return ProtobufResponse(output_to_proto(result).SerializeToString())
    return JsonResponse(output_to_json(result))


async def _stepped(outcome: Outcome) -> Response:
    step = _result_of(outcome).step
    metrics = {'learning_rate:mean': step.learning_rate}
    if step.HasField('grad_norm'):
        metrics['grad_norm:mean'] = step.grad_norm
    return JsonResponse({'metrics': _finite_metrics(metrics), 'type': 'optim_step'})


async def _saved(outcome: Outcome) -> Response:
    document: dict[str, Any] = {'path': outcome.note.facts.get('path'), 'type': outcome.note.verb}
    if outcome.note.verb == Verb.SAVE_EXTERNAL:
        document['size_bytes'] = _result_of(outcome).save.size_bytes
    return JsonResponse(document)


async def _published(outcome: Outcome) -> Response:
    session = outcome.note.facts.get('sampling_session_id')
    return JsonResponse({'sampling_session_id': session, 'type': 'save_weights_for_sampler'})


async def _unloaded(outcome: Outcome) -> Response:
    return JsonResponse({'model_id': outcome.note.facts.get('model_id'), 'type': 'unload_model'})


def _result_of(outcome: Outcome) -> operation_result_pb2.OperationResult:
    return training_service_pb2.ExecuteResponse.FromString(outcome.result).result


def output_to_proto(result: operation_result_pb2.ForwardResult) -> wire.ForwardBackwardOutput:
    """Return the result of a pass as a message; each record holds consecutive examples of equal trailing dimensions."""
    output = wire.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE, metrics=metrics_of(result))
    for trailing_shape, arrays in groupby(_logprobs(result), key=lambda array: array.shape[1:]):
        group = list(arrays)
        record = output.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(group))
        record.fields[_FIELD].CopyFrom(_batched(group, trailing_shape))
    return output


def output_to_json(result: operation_result_pb2.ForwardResult) -> dict[str, Any]:
    """Return the result of a pass as a JSON document."""
    return {
        'loss_fn_output_type': OUTPUT_TYPE,
        'loss_fn_outputs': [{_FIELD: array_to_json(array)} for array in _logprobs(result)],
        'metrics': _finite_metrics(metrics_of(result)),
    }


def metrics_of(result: operation_result_pb2.ForwardResult) -> dict[str, float]:
    """Return the metrics of a pass as `name:reduction`, which tells clients how to combine the parts of a batch."""
    reported = {_metric_name(name): value for name, value in result.metrics.items()}
    return {**reported, 'loss:sum': result.loss, 'num_tokens:sum': float(result.label_count)}


def _metric_name(name: str) -> str:
    return name if name.count(':') == 1 else f'{name.replace(":", "_")}:mean'


def _finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    # JSON cannot represent other numbers, and clients accept nothing else in their place.
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


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
