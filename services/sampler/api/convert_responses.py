"""Converts domain values to response messages."""

import math
from collections.abc import Sequence

import numpy as np

from twinkle.api.sampler.v1 import engine_pb2, sampler_service_pb2, sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import ProbeResult, StopReason, VersionSpan
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.rpc.tensors import tensor_to_proto
from twinkle_services.sampler.application.batch import CompletedPrompt, CompletedSequence
from twinkle_services.sampler.application.sampling import ScoredSequence
from twinkle_services.sampler.domain.generation import (
    EngineLoad,
    GenerationEvent,
    PromptComputed,
    SequenceFinished,
    TokenForm,
    TokensSampled,
    TopTokens,
)
from twinkle_services.sampler.domain.residency import ResidentVersion

_STOP_REASONS = {
    StopReason.LENGTH: sampling_pb2.STOP_REASON_LENGTH,
    StopReason.STOP: sampling_pb2.STOP_REASON_STOP,
    StopReason.ABORT: sampling_pb2.STOP_REASON_ABORT,
}


def event_to_proto(event: GenerationEvent) -> sampler_service_pb2.SampleResponse:
    if isinstance(event, PromptComputed):
        return sampler_service_pb2.SampleResponse(prompt=_prompt_to_proto(event))
    if isinstance(event, TokensSampled):
        return sampler_service_pb2.SampleResponse(delta=_delta_to_proto(event))
    return sampler_service_pb2.SampleResponse(finished=_finished_to_proto(event))


def completed_to_proto(prompt: CompletedPrompt) -> sampler_service_pb2.SampleBatchResponse:
    return sampler_service_pb2.SampleBatchResponse(
        prompt_index=prompt.prompt_index,
        prompt=_prompt_to_proto(prompt.prompt),
        sequences=[_sequence_to_proto(sequence) for sequence in prompt.sequences],
    )


def scores_to_proto(sequences: list[ScoredSequence]) -> sampler_service_pb2.ComputeLogprobsResponse:
    response = sampler_service_pb2.ComputeLogprobsResponse()
    for scored in sequences:
        response.sequences.add(
            logprobs=_prompt_logprobs(scored.prompt.logprobs or []),
            top_logprobs=_top_to_proto(scored.prompt.top_logprobs),
            version=scored.version,
        )
    return response


def resident_to_proto(version: ResidentVersion) -> engine_pb2.ResidentAdapter:
    """Convert a resident version; the `adapter_id` of a checkpoint is its path, without the digest."""
    return engine_pb2.ResidentAdapter(
        adapter_id=version.key.adapter.name.partition('#')[0],
        version=version.key.version,
        size_bytes=version.size_bytes,
        sequence_count=version.use_count,
    )


def load_to_proto(load: EngineLoad) -> engine_pb2.EngineLoad:
    return engine_pb2.EngineLoad(
        running_sequence_count=load.running_sequences,
        waiting_sequence_count=load.waiting_sequences,
        kv_usage=load.kv_usage,
        tokens_per_second=load.tokens_per_second,
        prefix_hit_rate=load.prefix_hit_rate,
        is_paused=load.is_paused,
        is_sleeping=load.is_sleeping,
        max_sequence_count=load.max_sequences,
    )


def forms_to_proto(forms: Sequence[TokenForm]) -> sampler_service_pb2.DescribeTokensResponse:
    return sampler_service_pb2.DescribeTokensResponse(
        tokens=[sampling_pb2.TokenForm(piece=form.piece, is_special=form.is_special) for form in forms]
    )


def _prompt_to_proto(prompt: PromptComputed) -> sampling_pb2.PromptInfo:
    probe = prompt.probe or ProbeResult()
    return sampling_pb2.PromptInfo(
        token_ids=_ints(prompt.token_ids),
        logprobs=None if prompt.logprobs is None else _prompt_logprobs(prompt.logprobs),
        top_logprobs=_top_to_proto(prompt.top_logprobs),
        cached_token_count=prompt.cached_tokens,
        target_logprobs=None if probe.target_logprobs is None else tensor_to_proto(probe.target_logprobs),
        drawn_token_ids=None if probe.drawn_token_ids is None else tensor_to_proto(probe.drawn_token_ids),
        drawn_logprobs=None if probe.drawn_logprobs is None else tensor_to_proto(probe.drawn_logprobs),
        embedding=None if probe.embedding is None else tensor_to_proto(probe.embedding),
        version=prompt.version,
    )


def _delta_to_proto(event: TokensSampled) -> sampling_pb2.TokenDelta:
    return sampling_pb2.TokenDelta(
        sequence_index=event.sequence_index,
        token_ids=_ints(event.tokens),
        logprobs=_floats([entry[0][1] for entry in event.logprobs]),
        top_logprobs=_top_to_proto([entry[1:] for entry in event.logprobs]),
        text=event.text,
        version=event.version,
    )


def _finished_to_proto(event: SequenceFinished) -> sampling_pb2.SequenceFinished:
    return sampling_pb2.SequenceFinished(
        sequence_index=event.sequence_index,
        stop_reason=_STOP_REASONS[event.stop_reason],
        sequence_id=new_id('sq'),
        version_spans=_spans_to_proto(event.version_spans),
        text=event.text,
        routed_experts=None if event.routed_experts is None else tensor_to_proto(event.routed_experts),
    )


def _sequence_to_proto(sequence: CompletedSequence) -> sampling_pb2.SampledSequence:
    return sampling_pb2.SampledSequence(
        sequence_id=new_id('sq'),
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        token_ids=_ints(sequence.tokens),
        logprobs=_floats([entry[0][1] for entry in sequence.logprobs]),
        top_logprobs=_top_to_proto([entry[1:] for entry in sequence.logprobs]),
        text=sequence.text,
        version_spans=_spans_to_proto(sequence.version_spans),
        routed_experts=None if sequence.routed_experts is None else tensor_to_proto(sequence.routed_experts),
    )


def _spans_to_proto(spans: list[VersionSpan]) -> list[sampling_pb2.VersionSpan]:
    return [
        sampling_pb2.VersionSpan(version=span.version, begin_token=span.begin_token, end_token=span.end_token)
        for span in spans
    ]


def _top_to_proto(rows: list[TopTokens] | list[TopTokens | None] | None) -> sampling_pb2.TopLogprobs | None:
    """Return tensors of shape `[T, k]` for T rows, with k as the length of the longest row; None if all are empty.

    Shorter rows are filled with token 0 and log-probability -infinity.
    """
    width = max((len(row) for row in rows or () if row), default=0)
    if not rows or not width:
        return None
    token_ids = np.zeros((len(rows), width), dtype=np.int32)
    logprobs = np.full((len(rows), width), -math.inf, dtype=np.float32)
    for position, row in enumerate(rows):
        for column, (token_id, logprob) in enumerate(row or ()):
            token_ids[position, column], logprobs[position, column] = token_id, logprob
    return sampling_pb2.TopLogprobs(token_ids=tensor_to_proto(token_ids), logprobs=tensor_to_proto(logprobs))


def _prompt_logprobs(values: list[float | None]) -> tensor_pb2.Tensor:
    return _floats([math.nan if value is None else value for value in values])


def _ints(values: list[int] | tuple[int, ...]) -> tensor_pb2.Tensor:
    return tensor_to_proto(np.asarray(values, dtype=np.int32))


def _floats(values: list[float]) -> tensor_pb2.Tensor:
    return tensor_to_proto(np.asarray(values, dtype=np.float32))
