"""Requests to samplers as the gateway routes them, the progress of a streamed response, and sampling handles.

Requests and responses contain the serialized messages unchanged, and the values that routing and failover need.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import NamedTuple

from twinkle_services.gateway.fleet.sampler_choice import AdapterRequest, RouteKey
from twinkle_services.gateway.quotas.rules import Work

MAX_SEQUENCES = 128
"""Maximum number of sequences per prompt in the contract."""
MAX_DELIVERED_TOKENS = 4096
"""Maximum number of delivered tokens with which a client may continue a request, in all sequences together."""


class ChunkKind(Enum):
    """Content of a chunk of a streamed response."""

    PROMPT = 'prompt'
    DELTA = 'delta'
    FINISHED = 'finished'


class SampleChunk(NamedTuple):
    """One message of a streamed response."""

    message: bytes
    """Serialized SampleResponse."""
    kind: ChunkKind
    sequence_index: int = 0
    token_data: bytes = b''
    """New tokens, int32 little-endian."""
    version: int = 0
    prompt_token_count: int = 0
    """Length of the prompt; set in the chunk of kind PROMPT only."""

    @property
    def work(self) -> Work | None:
        """Usage to count for the chunk; None if there is no usage."""
        if self.kind is ChunkKind.PROMPT:
            return Work(prompt_token_count=self.prompt_token_count, prompt_count=1)
        return Work(sampled_token_count=len(self.token_data) // 4) if self.token_data else None


@dataclass
class DeliveredSequence:
    """The part of one sequence that the client received."""

    token_data: bytearray = field(default_factory=bytearray)
    is_finished: bool = False


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Request to stream the completions of one prompt."""

    message: bytes
    """Serialized SampleRequest."""
    key: RouteKey
    request_id: str = ''
    """Empty if the sampler chooses an id."""
    is_renamed: bool = False
    """Whether `request_id` differs from the message: an earlier attempt may still run under the message's id."""
    delivered: tuple[DeliveredSequence, ...] = ()
    """Sequences that the client received from an earlier request; empty for a new request."""
    prompt_token_count: int = 0
    """Length of the prompt, if the message contains tokens."""

    @property
    def version(self) -> int:
        """Version of a continued request; 0 is the base model."""
        return (self.key.adapter.exact or 0) if self.key.adapter else 0

    @property
    def continued_work(self) -> Work | None:
        """Usage of the prompt and the delivered tokens, which a sampler computes again; None for a new request."""
        if not self.delivered:
            return None
        count = sum(len(item.token_data) // 4 for item in self.delivered if not item.is_finished)
        return Work(prompt_token_count=self.prompt_token_count + count, prompt_count=1)


@dataclass(frozen=True, kw_only=True)
class RoutedRequest:
    """Unary call to one replica."""

    method: str
    """Name of the method in the sampler's contract."""
    message: bytes
    key: RouteKey


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """SampleBatch or ComputeLogprobs: several prompts, which several replicas may share."""

    message: bytes
    keys: tuple[RouteKey, ...]
    """Key of each prompt; base model and adapter are equal in all."""
    is_scored: bool = False
    """Whether the request is a ComputeLogprobs."""
    is_version_open: bool = False
    """Whether the adapter version has to be resolved before the batch is divided."""
    request_id: str = ''
    token_count: int = 0
    """Total length of the sequences to score."""


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """Part of a batch for one replica."""

    request: BatchRequest
    positions: tuple[int, ...]
    """Indices of the part's prompts in the batch."""
    version: int | None = None
    """Resolved version; None if no version had to be resolved."""
    request_id: str = ''
    """Empty if the part has the id of the batch."""
    is_retry: bool = False
    """Whether an earlier attempt failed; a retry does not use the id of the batch."""

    @property
    def is_complete(self) -> bool:
        return len(self.positions) == len(self.request.keys)

    @property
    def sequence_count(self) -> int:
        """Number of sequences that the replica will run."""
        return sum(self.request.keys[position].weight for position in self.positions)


class PromptResult(NamedTuple):
    """Completions of one prompt of a batch."""

    position: int
    """Index of the prompt in the batch."""
    message: bytes
    """Serialized SampleBatchResponse with that index."""
    prompt_token_count: int = 0
    sampled_token_count: int = 0
    """Tokens of all sequences."""

    @property
    def work(self) -> Work:
        """Usage of the prompt and its completions."""
        return Work(
            prompt_token_count=self.prompt_token_count, sampled_token_count=self.sampled_token_count, prompt_count=1
        )


class Progress:
    """The part of a streamed response that the client received; another sampler continues from it."""

    def __init__(self, request: SampleRequest) -> None:
        self.sequences = [DeliveredSequence(bytearray(item.token_data), item.is_finished) for item in request.delivered]
        self.version: int | None = request.version if self.sequences else None
        """Version that sampled the delivered tokens; None before the first token."""
        self._is_prompt_delivered = bool(self.sequences)
        self.sequences = self.sequences or [DeliveredSequence() for _ in range(request.key.weight)]

    @property
    def has_tokens(self) -> bool:
        """Whether tokens were delivered; without tokens, another sampler may start the request over."""
        return self.version is not None

    @property
    def is_complete(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def open_count(self) -> int:
        return sum(not sequence.is_finished for sequence in self.sequences)

    def record(self, chunk: SampleChunk) -> bool:
        """Record a chunk and return whether to deliver it: the prompt and each finish are delivered only once."""
        if chunk.kind is ChunkKind.PROMPT:
            is_new, self._is_prompt_delivered = not self._is_prompt_delivered, True
            return is_new
        if not 0 <= chunk.sequence_index < len(self.sequences):
            return True
        sequence = self.sequences[chunk.sequence_index]
        if sequence.is_finished:
            return False
        if chunk.kind is ChunkKind.FINISHED:
            sequence.is_finished = True
        else:
            sequence.token_data += chunk.token_data
            self.version = chunk.version
        return True


@dataclass(frozen=True, kw_only=True)
class HandleRequest:
    """Request for a sampling handle. Without a checkpoint and an adapter, the handle refers to the base model alone."""

    handle_id: str
    session_id: str
    base_model: str = ''
    """Empty selects the base model of the weights."""
    checkpoint_path: str = ''
    adapter_id: str = ''
    future_id: str = ''
    is_inflight: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplingHandle:
    """Short id for the weights that a client samples from. Copies of the client share the handle."""

    handle_id: str
    tenant_id: str
    session_id: str
    """Session in which the handle was created."""
    base_model: str
    """Empty if the adapter's base model has not been looked up yet."""
    checkpoint_path: str = ''
    """Native path of saved weights; empty if absent."""
    adapter_id: str = ''
    """Run that publishes the weights; empty if absent."""
    future_id: str = ''
    """Future that publishes the version."""
    version: int | None = None
    """Published version; None while it is unknown."""
    is_inflight: bool = False
    """Whether newer versions may be used instead of exactly this version."""
    clone_count: int = 0
    """Number of copies of the client."""
    create_time: datetime
    """UTC."""

    @property
    def is_version_due(self) -> bool:
        """Whether the version is not known yet, because a future has to publish it."""
        return bool(self.future_id) and self.version is None

    @property
    def adapter(self) -> AdapterRequest | None:
        """Weights to route to, once the version is known; None for the base model alone."""
        if self.checkpoint_path:
            return AdapterRequest(adapter_id=self.checkpoint_path, is_checkpoint=True)
        if not self.adapter_id:
            return None
        if self.is_inflight:
            return AdapterRequest(adapter_id=self.adapter_id, at_least=self.version)
        return AdapterRequest(adapter_id=self.adapter_id, exact=self.version)

    def is_same_as(self, other: 'SamplingHandle') -> bool:
        """Return whether two handles have the same session and weights; an unknown base model matches every other."""
        facts = (self.session_id, self.checkpoint_path, self.adapter_id, self.future_id, self.is_inflight)
        others = (other.session_id, other.checkpoint_path, other.adapter_id, other.future_id, other.is_inflight)
        is_same_base = not self.base_model or not other.base_model or self.base_model == other.base_model
        return facts == others and is_same_base
