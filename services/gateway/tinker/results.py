"""Outcomes of futures: the routes that clients poll, and the responses for finished futures.

Each poll waits for an outcome, so that clients poll rarely. Passes and samples are sent as protobuf, or as JSON to
older clients, and other results as JSON. Log-probabilities of sampled tokens are computed before temperature and
filters, as in training.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from twinkle.api.model.v1 import operation_result_pb2, training_service_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_services.gateway.errors import SessionNotFound
from twinkle_services.gateway.futures.futures import Futures
from twinkle_services.gateway.futures.rules import Future, FutureState
from twinkle_services.gateway.http.call import EncodedResponse, HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.tinker.arrays import Array, array_to_json, finite
from twinkle_services.gateway.tinker.bodies import PROTOBUF_TYPE, TinkerModel, accepts_protobuf, read_body
from twinkle_services.gateway.tinker.routes import ANY_KEY, WAIT_SECONDS, category_of, text_of, tinker_route
from twinkle_services.gateway.tinker.submission import FutureNote, Verb, note_of
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire
from twinkle_services.kit.errors import NotBuiltYet
from twinkle_services.kit.rpc.tensors import tensor_data_from_proto

OUTPUT_TYPE = 'ArrayRecord'
_FIELD = 'logprobs'
NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""Token and log-probability of an empty cell in a table of the most likely tokens."""

RecordPublished = Callable[[str, bytes], Awaitable[object]]
"""Records the result of a published version for a sampling handle, see `SamplingHandles.record_published`."""


@dataclass(frozen=True)
class Outcome:
    """Result of a finished future."""

    future: Future
    note: FutureNote
    result: bytes
    """Encoded native response."""
    is_protobuf_accepted: bool


class FutureBody(TinkerModel):
    """Body that names a future."""

    request_id: Annotated[str, Field(min_length=1, max_length=128)]


class FutureRoutes:
    """Routes of futures."""

    def __init__(
        self, futures: Futures, record_published: RecordPublished, *, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self._futures = futures
        self._wait_seconds = wait_seconds
        self._formats: Mapping[str, Callable[[Outcome], Awaitable[Response]]] = {
            Verb.CREATE_MODEL: _created,
            Verb.LOAD_MODEL: _loaded,
            Verb.LOAD_WEIGHTS: _loaded,
            Verb.FORWARD: partial(asyncio.to_thread, _passed),
            Verb.FORWARD_BACKWARD: partial(asyncio.to_thread, _passed),
            Verb.OPTIM_STEP: _stepped,
            Verb.SAVE_WEIGHTS: _saved,
            Verb.SAVE_FOR_SAMPLER: _saved,
            Verb.SAVE_EXTERNAL: _saved,
            Verb.PUBLISH: partial(_published, record_published),
            Verb.UNLOAD_MODEL: _unloaded,
            Verb.SAMPLE: partial(asyncio.to_thread, _sampled),
        }
        """Functions that build the responses, by verb."""

    def routes(self) -> list[Route]:
        return [
            tinker_route('retrieve_future', self._retrieve, access=ANY_KEY),
            tinker_route('cancel_future', self._cancel, access=ANY_KEY),
        ]

    async def _retrieve(self, call: HttpCall) -> Response:
        future_id = (await read_body(call, FutureBody)).request_id
        future = await self._futures.wait(future_id, seconds=self._wait_seconds)
        if not future.is_finished:
            state = 'paused_rate_limit' if self._futures.is_rate_limited(future.tenant_id) else 'active'
            return JsonResponse({'type': 'try_again', 'request_id': future_id, 'queue_state': state})
        if future.state is FutureState.FAILED and future.error is not None:
            return JsonResponse({'error': text_of(future.error), 'category': category_of(future.error)})
        note = note_of(future)
        if note.verb not in self._formats:
            raise NotBuiltYet(note.verb or future.kind)
        # The result and the response built from it are both in memory until the client has read the response.
        await call.reserve_body(2 * await self._futures.result_bytes(future))
        result = await self._futures.result(future)
        return await self._formats[note.verb](Outcome(future, note, result, accepts_protobuf(call)))

    async def _cancel(self, call: HttpCall) -> Response:
        await self._futures.cancel((await read_body(call, FutureBody)).request_id)
        return JsonResponse({'type': 'cancel_future'})


async def _created(outcome: Outcome) -> Response:
    return JsonResponse({'model_id': outcome.future.lane, 'type': 'create_model'})


async def _loaded(outcome: Outcome) -> Response:
    path = outcome.note.facts.get('path')
    return JsonResponse({'path': path, 'model_id': outcome.future.lane, 'type': 'load_weights'})


def _passed(outcome: Outcome) -> Response:
    result = _result_of(outcome).forward
    if outcome.is_protobuf_accepted:
        return EncodedResponse((output_to_proto(result).SerializeToString(),), PROTOBUF_TYPE)
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


async def _published(record_published: RecordPublished, outcome: Outcome) -> Response:
    session = outcome.note.facts.get('sampling_session_id')
    # An interrupted save may not have created the handle; the client resends the save.
    with suppress(SessionNotFound):
        await record_published(str(session or ''), outcome.result)
    return JsonResponse({'sampling_session_id': session, 'type': 'save_weights_for_sampler'})


async def _unloaded(outcome: Outcome) -> Response:
    return JsonResponse({'model_id': outcome.note.facts.get('model_id'), 'type': 'unload_model'})


def _result_of(outcome: Outcome) -> operation_result_pb2.OperationResult:
    return training_service_pb2.ExecuteResponse.FromString(outcome.result).result


def output_to_proto(result: operation_result_pb2.ForwardResult) -> wire.ForwardBackwardOutput:
    """Return the result of a pass as a message; a record holds consecutive examples with equal trailing dimensions."""
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
    """Return the metrics of a pass by `name:reduction`; clients combine the parts of a batch with the reduction."""
    reported = {
        name if name.count(':') == 1 else f'{name.replace(":", "_")}:mean': value
        for name, value in result.metrics.items()
    }
    return {**reported, 'loss:sum': result.loss, 'num_tokens:sum': float(result.label_count)}


def _finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    # JSON cannot represent other numbers, and clients accept no substitutes.
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


def _sampled(outcome: Outcome) -> Response:
    result = sampler_service_pb2.SampleBatchResponse.FromString(outcome.result)
    if any(sequence.stop_reason == sampling_pb2.STOP_REASON_ABORT for sequence in result.sequences):
        # Tinker has no stop reason for an abort.
        return JsonResponse({'error': 'sampling was aborted by the operator of the sampler', 'category': 'server'})
    if outcome.is_protobuf_accepted:
        return EncodedResponse((sample_to_proto(result, outcome.note.facts).SerializeToString(),), PROTOBUF_TYPE)
    return JsonResponse(sample_to_json(result, outcome.note.facts))


def sample_to_proto(result: sampler_service_pb2.SampleBatchResponse, facts: Mapping[str, Any]) -> wire.SampleResponse:
    """Return the response to one prompt as a message; `facts` are from the `TinkerSampleRequest`."""
    response = wire.SampleResponse(prompt_cache_hit_tokens=result.prompt.cached_token_count)
    for sequence in result.sequences:
        added = response.sequences.add(
            stop_reason=wire.STOP_REASON_STOP if _is_stopped(sequence) else wire.STOP_REASON_LENGTH,
            tokens=_array(sequence.token_ids, '<i4').tobytes(),
            logprobs=_array(sequence.logprobs, '<f4').tobytes(),
        )
        if sequence.HasField('top_logprobs'):
            added.topk_sampled_logprobs.CopyFrom(_topk_to_proto(*_topk(sequence.top_logprobs)))
    scores = _prompt_scores(result.prompt, facts)
    if scores is not None:
        response.prompt_logprobs = scores.tobytes()
    if result.prompt.HasField('top_logprobs'):
        response.topk_prompt_logprobs.CopyFrom(_topk_to_proto(*_prompt_topk(result.prompt, facts)))
    _add_probe(response, result.prompt, is_sparse=facts.get('is_sparse', False))
    return response


def sample_to_json(result: sampler_service_pb2.SampleBatchResponse, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response as a JSON document without the alternatives of sampled tokens; see `sample_to_proto`."""
    document: dict[str, Any] = {
        'type': 'sample',
        'sequences': [
            {
                'stop_reason': 'stop' if _is_stopped(sequence) else 'length',
                'tokens': _array(sequence.token_ids, '<i4').tolist(),
                'logprobs': finite(_array(sequence.logprobs, '<f4')),
            }
            for sequence in result.sequences
        ],
    }
    scores = _prompt_scores(result.prompt, facts)
    if scores is not None:
        document['prompt_logprobs'] = finite(scores)
    if result.prompt.HasField('top_logprobs'):
        rows = zip(*(matrix.tolist() for matrix in _prompt_topk(result.prompt, facts)), strict=True)
        document['topk_prompt_logprobs'] = [_pairs(ids, logprobs) for ids, logprobs in rows]
    if result.prompt.HasField('target_logprobs'):
        document['target_prompt_logprobs'] = array_to_json(_filled(_array(result.prompt.target_logprobs, '<f4')))
    if result.prompt.HasField('drawn_token_ids'):
        tokens, logprobs = _array(result.prompt.drawn_token_ids, '<i8'), _array(result.prompt.drawn_logprobs, '<f4')
        document['prompt_alt_tokens'] = {'tokens': array_to_json(tokens), 'logprobs': array_to_json(logprobs)}
    return document


def _add_probe(response: wire.SampleResponse, prompt: sampling_pb2.PromptInfo, *, is_sparse: bool) -> None:
    """Add the scores of the target tokens, in the layout of the request, and the drawn tokens with their scores."""
    if prompt.HasField('target_logprobs'):
        scores = _array(prompt.target_logprobs, '<f4')
        response.target_prompt_logprobs.CopyFrom(_sparse_tensor(scores) if is_sparse else _tensor(_filled(scores)))
    if prompt.HasField('drawn_token_ids'):
        response.prompt_alt_tokens.tokens.CopyFrom(_tensor(_array(prompt.drawn_token_ids, '<i8')))
        response.prompt_alt_tokens.logprobs.CopyFrom(_tensor(_array(prompt.drawn_logprobs, '<f4')))


def _tensor(array: Array) -> wire.Tensor:
    dtype = wire.DTYPE_INT64 if array.dtype.kind == 'i' else wire.DTYPE_FLOAT32
    return wire.Tensor(dtype=dtype, shape=array.shape, dense=array.tobytes())


def _sparse_tensor(scores: Array) -> wire.Tensor:
    is_given = ~np.isnan(scores)
    rows, columns = np.cumsum([0, *is_given.sum(1)], dtype='<i8'), is_given.nonzero()[1].astype('<i8')
    values = scores[is_given].tobytes()
    sparse = wire.SparseCsr(values=values, crow_indices=rows.tobytes(), col_indices=columns.tobytes())
    return wire.Tensor(dtype=wire.DTYPE_FLOAT32, shape=scores.shape, sparse_csr=sparse)


def _filled(scores: Array) -> Array:
    """Replace NaN, which marks tokens that were not requested, with 0."""
    return np.nan_to_num(scores, neginf=-np.inf)


def _prompt_scores(prompt: sampling_pb2.PromptInfo, facts: Mapping[str, Any]) -> Array | None:
    """Return a prompt's log-probabilities, float32 [tokens], NaN for tokens without a score; None if not requested."""
    if not prompt.HasField('logprobs') or not facts.get('is_scored', True):
        return None
    scores = _array(prompt.logprobs, '<f4').copy()
    scores[: _unscored(scores.size, facts)] = np.nan
    return scores


def _is_stopped(sequence: sampling_pb2.SampledSequence) -> bool:
    return sequence.stop_reason == sampling_pb2.STOP_REASON_STOP


def _unscored(length: int, facts: Mapping[str, Any]) -> int:
    """Return the number of tokens at the start of a prompt that have no score."""
    return max(1, length - facts['last_n']) if 'last_n' in facts else 1


def _prompt_topk(prompt: sampling_pb2.PromptInfo, facts: Mapping[str, Any]) -> tuple[Array, Array]:
    ids, logprobs = _topk(prompt.top_logprobs)
    end = _unscored(len(ids), facts)
    ids[:end], logprobs[:end] = NO_TOKEN, NO_LOGPROB
    return ids, logprobs


def _topk(top: sampling_pb2.TopLogprobs) -> tuple[Array, Array]:
    ids, logprobs = _array(top.token_ids, '<i4').copy(), _array(top.logprobs, '<f4').copy()
    is_empty = ~np.isfinite(logprobs)
    ids[is_empty], logprobs[is_empty] = NO_TOKEN, NO_LOGPROB
    return ids, logprobs


def _topk_to_proto(ids: Array, logprobs: Array) -> wire.TopkLogprobs:
    length, count = ids.shape
    return wire.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=count, length=length)


def _pairs(ids: list[int], logprobs: list[float]) -> list[tuple[int, float]] | None:
    pairs = [(token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob != NO_LOGPROB]
    return pairs or None


def _array(tensor: tensor_pb2.Tensor, dtype: str) -> Array:
    return tensor_data_from_proto(tensor, 'tensor').to_numpy().astype(dtype, copy=False)
