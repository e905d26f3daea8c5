"""What the gateway says to samplers in its own words, and how far it reads what they say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from google.protobuf.message import DecodeError

from services.gateway.sampling.rules import Delivered, Piece, PieceKind, Progress, PromptAnswer, SampleOrder, Share
from services.kit.errors import DomainError, FieldViolation, ServiceUnreachable
from services.kit.ids import new_id
from services.kit.rpc.status import ForwardedError
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2


def piece_from_bytes(raw: bytes) -> Piece:
    """Return what a SampleResponse brings.

    Raises:
        ServiceUnreachable: it is none, so that it is no sampler that answers.
    """
    try:
        message = wire.SampleResponse.FromString(raw)
    except DecodeError as error:
        raise ServiceUnreachable('sampler') from error
    if message.HasField('delta'):
        delta = message.delta
        return Piece(raw, PieceKind.DELTA, delta.sequence_index, delta.token_ids.data, delta.version)
    if message.HasField('finished'):
        return Piece(raw, PieceKind.FINISHED, message.finished.sequence_index)
    return Piece(raw, PieceKind.PROMPT, prompt_token_count=token_count(message.prompt.token_ids))


def prompt_answer(raw: bytes, message: wire.SampleBatchResponse, position: int) -> PromptAnswer:
    """Return a SampleBatchResponse with its prompt's place in the whole batch."""
    return PromptAnswer(
        position,
        placed_answer(raw, position, message.prompt_index),
        prompt_token_count=token_count(message.prompt.token_ids),
        sampled_token_count=sum(token_count(sequence.token_ids) for sequence in message.sequences),
    )


def token_count(tensor: tensor_pb2.Tensor) -> int:
    """Return how many tokens a tensor of int32 holds."""
    return len(tensor.data) // 4


def continued_request(order: SampleOrder, progress: Progress) -> bytes:
    """Return the request that goes on where its reader has got to; where that is nowhere, the request anew.

    It has the version that it began with, and the id of the order, since its beginnings may still run under theirs.
    """
    message = wire.SampleRequest.FromString(order.request)
    message.request_id = order.request_id
    if not progress.has_tokens:
        return message.SerializeToString()
    _fix_version(message.adapter if message.HasField('adapter') else None, progress.version)
    for index, sequence in enumerate(progress.sequences):
        token_ids = tensor_pb2.Tensor(
            dtype=tensor_pb2.DTYPE_INT32, shape=[len(sequence.token_data) // 4], data=bytes(sequence.token_data)
        )
        message.continued.add(sequence_index=index, token_ids=token_ids, is_finished=sequence.is_finished)
    return message.SerializeToString()


def batch_request(share: Share) -> bytes:
    """Return the SampleBatch of a share: as it came, where it is all of it."""
    if share.is_whole and not share.request_id and share.version is None:
        return share.order.request
    message = wire.SampleBatchRequest.FromString(share.order.request)
    if share.request_id:
        message.request_id = share.request_id
    _fix_version(message.adapter if message.HasField('adapter') else None, share.version)
    if not share.is_whole:
        prompts = [message.prompts[position] for position in share.positions]
        whole, message = (
            message,
            wire.SampleBatchRequest(
                request_id=message.request_id, base_model=message.base_model, prompts=prompts, params=message.params
            ),
        )
        if whole.HasField('adapter'):
            message.adapter.CopyFrom(whole.adapter)
    return message.SerializeToString()


def score_request(share: Share) -> bytes:
    """Return the ComputeLogprobs of a share: as it came, where it is all of it."""
    if share.is_whole and share.version is None:
        return share.order.request
    message = wire.ComputeLogprobsRequest.FromString(share.order.request)
    _fix_version(message.adapter if message.HasField('adapter') else None, share.version)
    if not share.is_whole:
        sequences = [message.token_ids[position] for position in share.positions]
        copy = wire.ComputeLogprobsRequest(base_model=message.base_model, token_ids=sequences)
        if message.HasField('adapter'):
            copy.adapter.CopyFrom(message.adapter)
        if message.HasField('top_logprob_count'):
            copy.top_logprob_count = message.top_logprob_count
        message = copy
    return message.SerializeToString()


def adapter_of(request: bytes, *, is_scored: bool) -> sampling_pb2.AdapterRef:
    """Return the adapter that a batch names."""
    kind = wire.ComputeLogprobsRequest if is_scored else wire.SampleBatchRequest
    return kind.FromString(request).adapter


def placed_answer(raw: bytes, position: int, index: int) -> bytes:
    """Return a SampleBatchResponse with another place in it: of a field that comes twice, the last one counts."""
    if position == index:
        return raw
    # What it serialises to is nothing where the place is 0, so that one is written by hand.
    return raw + (wire.SampleBatchResponse(prompt_index=position).SerializeToString() or b'\x08\x00')


def placed_error(error: DomainError, share: Share) -> DomainError:
    """Return what a sampler says of a share, with the places of prompts or sequences as the caller counts them."""
    if not isinstance(error, ForwardedError) or share.is_whole:
        return error
    name = 'token_ids' if share.order.is_scored else 'prompts'

    def place(path: str) -> str:
        found = re.match(rf'{name}\[(\d{{1,9}})\]', path)
        if found is None or int(found[1]) >= len(share.positions):
            return path
        return f'{name}[{share.positions[int(found[1])]}]{path[found.end() :]}'

    return replace(
        error,
        # A message about a field begins with its path.
        message=place(error.message),
        facts={key: place(value) if key == 'field' else value for key, value in error.facts.items()},
        fields=tuple(FieldViolation(place(item.field), item.problem) for item in error.fields),
    )


def aborted_end(index: int, sequence: Delivered, *, version: int) -> bytes:
    """Return the end of a sequence that was aborted while no replica had it."""
    count = len(sequence.token_data) // 4
    spans = [sampling_pb2.VersionSpan(version=version, begin_token=0, end_token=count)] if count else []
    finished = sampling_pb2.SequenceFinished(
        sequence_index=index,
        stop_reason=sampling_pb2.STOP_REASON_ABORT,
        sequence_id=new_id('sq'),
        version_spans=spans,
    )
    return wire.SampleResponse(finished=finished).SerializeToString()


def aborted_answers(share: Share) -> Iterator[tuple[int, bytes]]:
    """Yield, for each prompt of a share that was aborted while no replica had it, its place and its answer."""
    message = wire.SampleBatchRequest.FromString(share.order.request)
    no_tokens = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[0])
    for position in share.positions:
        prompt = message.prompts[position]
        is_known = prompt.WhichOneof('content') == 'token_ids'
        answer = wire.SampleBatchResponse(
            prompt_index=position,
            prompt=sampling_pb2.PromptInfo(token_ids=prompt.token_ids if is_known else no_tokens),
        )
        for _ in range(share.order.keys[position].weight):
            answer.sequences.add(
                sequence_id=new_id('sq'),
                stop_reason=sampling_pb2.STOP_REASON_ABORT,
                token_ids=no_tokens,
                logprobs=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[0]),
            )
        yield position, answer.SerializeToString()


def _fix_version(adapter: sampling_pb2.AdapterRef | None, version: int | None) -> None:
    """Name a version exactly; a checkpoint's path has none, and neither has the base model."""
    if adapter is not None and version is not None and adapter.WhichOneof('version') != 'checkpoint_path':
        adapter.exact = version
