"""A request to the samplers as the gateway sees it, and how far its answer was delivered.

Requests and answers stay the bytes that they came as; beside them stands what routing and continuing need.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from services.gateway.fleet.routing import RouteKey

MAX_SEQUENCES = 128
"""Sequences of one prompt, as the contract has it."""


class PieceKind(Enum):
    """What a piece of a streamed answer is."""

    PROMPT = 'prompt'
    DELTA = 'delta'
    FINISHED = 'finished'


class Piece(NamedTuple):
    """A piece of a streamed answer."""

    raw: bytes
    """The message as it came."""
    kind: PieceKind
    sequence_index: int = 0
    token_data: bytes = b''
    """int32, little-endian: the new tokens."""
    version: int = 0
    prompt_token_count: int = 0
    """Of the prompt, in the piece that tells of it."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """A Sample."""

    request: bytes
    """The message as it came."""
    key: RouteKey
    request_id: str = ''
    """Empty: the sampler chooses one."""
    is_renamed: bool = False
    """Whether the id is another one than that in the message: its beginnings may still run under that."""


@dataclass(frozen=True, kw_only=True)
class RoutedOrder:
    """A call that one replica answers."""

    method: str
    """Its name in the sampler's contract."""
    request: bytes
    key: RouteKey


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """A SampleBatch or ComputeLogprobs: several prompts, which several replicas may share."""

    request: bytes
    keys: tuple[RouteKey, ...]
    """One a prompt; base model and adapter are the same in all of them."""
    is_scored: bool = False
    """Whether it is a ComputeLogprobs."""
    is_version_open: bool = False
    """Whether it is still to be found out which version is meant."""
    request_id: str = ''
    token_count: int = 0
    """Of the sequences that are to be scored."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a BatchOrder that one replica gets."""

    order: BatchOrder
    positions: tuple[int, ...]
    """Its prompts, by their place in the order."""
    version: int | None = None
    """The version that was found out; None: as the order says."""
    request_id: str = ''
    """Empty: as the order says."""
    is_again: bool = False
    """Whether a replica had it before."""

    @property
    def is_whole(self) -> bool:
        """Whether it has all prompts."""
        return len(self.positions) == len(self.order.keys)

    @property
    def weight(self) -> int:
        """Sequences it will run."""
        return sum(self.order.keys[position].weight for position in self.positions)


class PromptAnswer(NamedTuple):
    """The completions of one prompt of a batch."""

    position: int
    """Its place in the order."""
    raw: bytes
    """The message, with that place in it."""
    prompt_token_count: int = 0
    sampled_token_count: int = 0
    """Of all sequences."""


@dataclass
class Delivered:
    """One sequence as far as its reader has it."""

    token_data: bytearray = field(default_factory=bytearray)
    is_finished: bool = False


class Progress:
    """How far a streamed answer was delivered; what a sampler has to know to go on with it."""

    def __init__(self, sequence_count: int) -> None:
        """Begin with nothing delivered."""
        self.sequences = [Delivered() for _ in range(min(max(sequence_count, 1), MAX_SEQUENCES))]
        self.version: int | None = None
        """Version that drew the tokens so far; None before the first."""
        self._is_prompt_delivered = False

    @property
    def has_tokens(self) -> bool:
        """Whether there is something to go on from; otherwise the request begins anew, and nobody can tell."""
        return self.version is not None

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has its end."""
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def open_count(self) -> int:
        """Sequences that have no end yet."""
        return sum(not sequence.is_finished for sequence in self.sequences)

    def take(self, piece: Piece) -> bool:
        """Note a piece and return whether the reader is to have it: not twice the prompt, nor twice an end."""
        if piece.kind is PieceKind.PROMPT:
            is_new, self._is_prompt_delivered = not self._is_prompt_delivered, True
            return is_new
        if not 0 <= piece.sequence_index < len(self.sequences):
            return True
        sequence = self.sequences[piece.sequence_index]
        if sequence.is_finished:
            return False
        if piece.kind is PieceKind.FINISHED:
            sequence.is_finished = True
        else:
            sequence.token_data += piece.token_data
            self.version = piece.version
        return True
