"""Results of the sampler, and their conversion from messages of the contract."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.data_format import (
    IGNORE_INDEX,
    InputFeature,
    ProbeResult,
    SampledSequence,
    SampleResponse,
    StopReason,
    VersionSpan,
    extended_experts,
)
from twinkle_client.convert import tensor_from_proto

_STOP_REASONS: dict[int, StopReason] = {
    sampling_pb2.STOP_REASON_LENGTH: StopReason.LENGTH,
    sampling_pb2.STOP_REASON_STOP: StopReason.STOP,
    sampling_pb2.STOP_REASON_ABORT: StopReason.ABORT,
}


@dataclass(frozen=True, kw_only=True)
class SampleDelta:
    """New tokens of a streamed sequence, or its end."""

    sequence_index: int
    text: str
    """New text; empty while the last tokens do not form complete characters. At the end: the remaining text."""
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    """See `SampledSequence.logprobs`."""
    version: int | None
    """Adapter version that generated the tokens, 0 for the base model; None at the end."""
    stop_reason: StopReason | None
    """Reason for the end of the sequence; None before the end."""
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    """See `SampledSequence.routed_experts`; None before the end."""


def sample_response(response: sampler_service_pb2.SampleBatchResponse, *, prompt: Any) -> SampleResponse:
    """Return the completions of `prompt` as a response of the library."""
    prompt_ids = tensor_from_proto(response.prompt.token_ids)
    logprobs: list[float | None] | None = None
    if response.prompt.HasField('logprobs'):
        values = tensor_from_proto(response.prompt.logprobs)
        logprobs = [None if np.isnan(value) else float(value) for value in values]
    top: list[list[tuple[int, float]] | None] | None = None
    if response.prompt.HasField('top_logprobs'):
        top = [row or None for row in _top_logprobs(response.prompt.top_logprobs)]
    return SampleResponse(
        sequences=[_sequence(item, prompt=prompt, prompt_ids=prompt_ids) for item in response.sequences],
        prompt_token_ids=[int(token) for token in prompt_ids],
        prompt_logprobs=logprobs,
        topk_prompt_logprobs=top,
        prompt_probe=_probe_result(response.prompt),
    )


def _probe_result(prompt: sampling_pb2.PromptInfo) -> ProbeResult | None:
    fields = ('target_logprobs', 'drawn_token_ids', 'drawn_logprobs', 'embedding')
    names = [name for name in fields if prompt.HasField(name)]
    return ProbeResult(**{name: tensor_from_proto(getattr(prompt, name)) for name in names}) if names else None


def delta_from_proto(delta: sampling_pb2.TokenDelta) -> SampleDelta:
    """Convert new tokens."""
    return SampleDelta(
        sequence_index=delta.sequence_index,
        text=delta.text,
        tokens=[int(token) for token in tensor_from_proto(delta.token_ids)],
        logprobs=_token_logprobs(delta),
        version=delta.version,
        stop_reason=None,
    )


def end_from_proto(finished: sampling_pb2.SequenceFinished) -> SampleDelta:
    """Convert the end of a sequence."""
    return SampleDelta(
        sequence_index=finished.sequence_index,
        text=finished.text,
        tokens=[],
        logprobs=[],
        version=None,
        stop_reason=_STOP_REASONS.get(finished.stop_reason, StopReason.ERROR),
        routed_experts=tensor_from_proto(finished.routed_experts) if finished.HasField('routed_experts') else None,
    )


def completion_feature(prompt: Any, prompt_ids: npt.NDArray[Any], sequence: SampledSequence) -> InputFeature:
    """Return prompt and completion as a training example, as the library's sampler does.

    `labels`, `completion_mask` and `old_logps` of the prompt, which cover earlier turns, are extended by the values of
    the completion. Log-probabilities have the positions of their labels, as policy losses require.

    Args:
        prompt: Prompt of the completion. The completion is appended to the messages of a chat; its user data is
            copied.
        prompt_ids: int [P].
        sequence: Completion of C tokens.
    """
    completion_ids = np.asarray(sequence.tokens, dtype=np.int32)
    input_ids = np.concatenate([prompt_ids, completion_ids]).astype(np.int32)
    fields: Mapping[str, Any] = cast(Mapping[str, Any], prompt) if isinstance(prompt, Mapping) else {}
    # labels[t] is predicted from the tokens 0..t, so the first completion token is the last prompt token's label.
    begin = len(prompt_ids) - 1
    logprobs = [row[0][1] for row in sequence.logprobs]
    feature = InputFeature(
        input_ids=input_ids,
        labels=_extended(fields, 'labels', len(input_ids), begin=begin, values=completion_ids, default=IGNORE_INDEX),
        completion_mask=_extended(
            fields, 'completion_mask', len(input_ids), begin=begin + 1, values=np.ones_like(completion_ids), default=0
        ),
        old_logps=_extended(
            fields, 'old_logps', len(input_ids), begin=begin, values=np.asarray(logprobs, dtype=np.float32), default=0
        ),
        length=len(input_ids),
    )
    earlier = fields.get('routed_experts') if fields.get('input_ids') is not None else None
    experts = extended_experts(earlier, sequence.routed_experts)
    if experts is not None:
        feature['routed_experts'] = experts
    if fields.get('messages'):
        feature['messages'] = [*fields['messages'], {'role': 'assistant', 'content': sequence.decoded}]
    if fields.get('user_data'):
        feature['user_data'] = fields['user_data']
    return feature


def _extended(
    fields: Mapping[str, Any], name: str, length: int, *, begin: int, values: npt.NDArray[Any], default: int
) -> npt.NDArray[Any]:
    """Return the prompt's field `name`, padded to `length`, with `values` written from `begin` on."""
    stream = np.full(length, default, dtype=values.dtype)
    if fields.get('input_ids') is not None and fields.get(name) is not None:
        stream[: length - len(values)] = fields[name]
    stream[begin : begin + len(values)] = values
    return stream


def _sequence(sequence: sampling_pb2.SampledSequence, *, prompt: Any, prompt_ids: npt.NDArray[Any]) -> SampledSequence:
    sampled = SampledSequence(
        stop_reason=_STOP_REASONS.get(sequence.stop_reason, StopReason.ERROR),
        tokens=[int(token) for token in tensor_from_proto(sequence.token_ids)],
        logprobs=_token_logprobs(sequence),
        decoded=sequence.text,
        version_spans=[
            VersionSpan(version=span.version, begin_token=span.begin_token, end_token=span.end_token)
            for span in sequence.version_spans
        ],
        routed_experts=tensor_from_proto(sequence.routed_experts) if sequence.HasField('routed_experts') else None,
    )
    return replace(sampled, new_input_feature=completion_feature(prompt, prompt_ids, sampled))


def _token_logprobs(part: sampling_pb2.SampledSequence | sampling_pb2.TokenDelta) -> list[list[tuple[int, float]]]:
    """Return `(id, log-probability)` pairs for each token: the token itself, then the most likely candidates."""
    pairs = zip(tensor_from_proto(part.token_ids), tensor_from_proto(part.logprobs), strict=True)
    rows = [[(int(token), float(logprob))] for token, logprob in pairs]
    if part.HasField('top_logprobs'):
        for row, candidates in zip(rows, _top_logprobs(part.top_logprobs), strict=True):
            row.extend(candidates)
    return rows


def _top_logprobs(top: sampling_pb2.TopLogprobs) -> list[list[tuple[int, float]]]:
    ids, values = tensor_from_proto(top.token_ids), tensor_from_proto(top.logprobs)
    return [
        [(int(token), float(logprob)) for token, logprob in zip(*row, strict=True) if np.isfinite(logprob)]
        for row in zip(ids, values, strict=True)
    ]
