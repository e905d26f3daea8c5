"""What came of training, in Tinker's words, by the verb that was asked for."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.http.call import HttpCall, JsonResponse, Response
from services.gateway.tinker.bodies import PROTOBUF_TYPE
from services.gateway.tinker.future_routes import AnswerOf, Outcome
from services.gateway.tinker.notes import Verb
from services.gateway.tinker.training_result import output_to_json, output_to_proto
from twinkle.api.model.v1 import operation_result_pb2, training_service_pb2


@dataclass(frozen=True)
class ProtobufResponse:
    """A message."""

    data: bytes

    async def write(self, call: HttpCall) -> None:
        """Write all of it."""
        await call.begin(200, PROTOBUF_TYPE, {'content-length': str(len(self.data))})
        await call.write(self.data, is_last=True)


def training_answers() -> Mapping[str, AnswerOf]:
    """Return what makes the answers."""
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
    return await asyncio.to_thread(_pass_answer, outcome)


def _pass_answer(outcome: Outcome) -> Response:
    result = _result_of(outcome).forward
    if outcome.is_protobuf_wanted:
        return ProtobufResponse(output_to_proto(result).SerializeToString())
    return JsonResponse(output_to_json(result))


async def _stepped(outcome: Outcome) -> Response:
    step = _result_of(outcome).step
    metrics = {'learning_rate:mean': step.learning_rate}
    if step.HasField('grad_norm'):
        metrics['grad_norm:mean'] = step.grad_norm
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return JsonResponse({'metrics': finite, 'type': 'optim_step'})


async def _saved(outcome: Outcome) -> Response:
    answer: dict[str, Any] = {'path': outcome.note.facts.get('path'), 'type': outcome.note.verb}
    if outcome.note.verb == Verb.SAVE_EXTERNAL:
        answer['size_bytes'] = _result_of(outcome).save.size_bytes
    return JsonResponse(answer)


async def _published(outcome: Outcome) -> Response:
    session = outcome.note.facts.get('sampling_session_id')
    return JsonResponse({'sampling_session_id': session, 'type': 'save_weights_for_sampler'})


async def _unloaded(outcome: Outcome) -> Response:
    return JsonResponse({'model_id': outcome.note.facts.get('model_id'), 'type': 'unload_model'})


def _result_of(outcome: Outcome) -> operation_result_pb2.OperationResult:
    return training_service_pb2.ExecuteResponse.FromString(outcome.result).result
