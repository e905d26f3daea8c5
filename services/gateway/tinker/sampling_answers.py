"""What came of sampling and of publishing for it, told to whoever asks for the future."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from services.gateway.errors import SessionNotFound
from services.gateway.http.call import JsonResponse, Response
from services.gateway.sampling.handles import SamplingHandles
from services.gateway.tinker.future_routes import AnswerOf, Outcome
from services.gateway.tinker.notes import Verb
from services.gateway.tinker.sampling_result import is_aborted, sample_to_json, sample_to_proto
from services.gateway.tinker.sampling_routes import SAMPLE_VERB
from services.gateway.tinker.training_answers import ProtobufResponse
from twinkle.api.sampler.v1 import sampler_service_pb2


def sampling_answers(handles: SamplingHandles) -> Mapping[str, AnswerOf]:
    """Return what makes the answers; `handles` learn which version was published when their client does."""

    async def published(outcome: Outcome) -> Response:
        handle = str(outcome.note.facts.get('sampling_session_id', ''))
        # A request to save that was cut off in the middle left no handle; its client will send it again.
        with suppress(SessionNotFound):
            await handles.note_published(handle, outcome.result)
        return JsonResponse({'sampling_session_id': handle, 'type': Verb.SAVE_FOR_SAMPLER})

    return {SAMPLE_VERB: _sampled, Verb.PUBLISH: published}


async def _sampled(outcome: Outcome) -> Response:
    return await asyncio.to_thread(_sample_answer, outcome)


def _sample_answer(outcome: Outcome) -> Response:
    answer = sampler_service_pb2.SampleBatchResponse.FromString(outcome.result)
    if is_aborted(answer):
        return JsonResponse({'error': 'sampling was stopped by whoever runs the sampler', 'category': 'server'})
    if outcome.is_protobuf_wanted:
        return ProtobufResponse(sample_to_proto(answer, outcome.note.facts).SerializeToString())
    return JsonResponse(sample_to_json(answer, outcome.note.facts))
