"""What samplers tell, as pieces of choices: text, scored tokens, an end; and what the whole answer adds up to."""

import codecs
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO

import numpy as np

from services.gateway.openai.asked import Asked
from services.gateway.openai.samplers import PlacedResponse
from services.gateway.openai.token_names import TokenName, TokenNames
from services.kit.caller import Caller
from services.kit.errors import Cancelled
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2

NEVER_LOGPROB = -9999.0
"""What OpenAI's API tells instead of minus infinity, which JSON does not have."""

_FINISH_REASONS = {sampling_pb2.STOP_REASON_LENGTH: 'length', sampling_pb2.STOP_REASON_STOP: 'stop'}
_Top = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class ScoredToken:
    """A token and how likely it was."""

    name: TokenName
    logprob: float | None
    """Natural; None for the first token of a prompt."""
    top: Sequence[tuple[TokenName, float]]
    """The most likely tokens here, most likely first."""
    text_offset: int
    """Characters of the choice's text before it."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of one choice, or all of it."""

    index: int
    text: str = ''
    token_ids: Sequence[int] = ()
    """New tokens; an echoed prompt's are not among them."""
    scored: Sequence[ScoredToken] = ()
    """Where asked for; an echoed prompt's come first."""
    finish_reason: str | None = None
    """None until the choice is complete."""
    prompt_token_ids: Sequence[int] | None = None
    """In the first piece of a choice."""


@dataclass
class Tally:
    """What an answer adds up to."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    spans: dict[int, list[sampling_pb2.VersionSpan]] = field(default_factory=dict[int, list[sampling_pb2.VersionSpan]])
    """Of the choices that are complete, by index: which version produced which tokens."""


class PieceReader:
    """Reads the samplers' answers to one request, in the order they come."""

    def __init__(self, asked: Asked, base_model: str, caller: Caller, names: TokenNames) -> None:
        """Read answers to `asked`; `names` knows what the tokens of `base_model` stand for."""
        self._asked = asked
        self._base_model = base_model
        self._caller = caller
        self._names = names
        self._offsets: defaultdict[int, _TextLength] = defaultdict(_TextLength)
        self.tally = Tally()

    async def read(self, placed: PlacedResponse) -> list[Piece]:
        """Return the pieces that a response brings.

        Raises:
            Cancelled: somebody with the right to ended a sequence.
            DomainError: no sampler could tell what tokens stand for.
        """
        place, response = placed
        first_index = place * self._asked.sample_count
        match response.WhichOneof('event'):
            case 'prompt':
                return await self._read_prompt(place, first_index, response.prompt)
            case 'delta':
                return [await self._read_delta(first_index, response.delta)]
            case 'finished':
                return [self._read_end(first_index, response.finished)]
            case _:
                return []

    async def _read_prompt(self, place: int, first_index: int, prompt: sampling_pb2.PromptInfo) -> list[Piece]:
        token_ids = _ints(prompt.token_ids)
        self.tally.prompt_tokens += len(token_ids)
        self.tally.cached_tokens += prompt.cached_token_count
        indices = range(first_index, first_index + self._asked.sample_count)
        if not self._asked.is_echoed:
            return [Piece(index=index, prompt_token_ids=token_ids) for index in indices]
        text = self._asked.prompts[place].text
        if not text:
            names = await self._names.of(self._caller, self._base_model, token_ids)
            pieces = (names[token_id].piece for token_id in token_ids if not names[token_id].is_special)
            text = b''.join(pieces).decode(errors='replace')
        logprobs = _floats(prompt.logprobs) if self._is_scored else []
        top = _rows(prompt.top_logprobs)
        # Their choices all begin with it: one score is theirs together, however many they are.
        scored = await self._score(first_index, token_ids, logprobs, top)
        for index in indices[1:]:
            self._offsets[index].go_on(token.name for token in scored)
        return [Piece(index=index, text=text, scored=scored, prompt_token_ids=token_ids) for index in indices]

    async def _read_delta(self, first_index: int, delta: sampling_pb2.TokenDelta) -> Piece:
        index = first_index + delta.sequence_index
        token_ids = _ints(delta.token_ids)
        self.tally.completion_tokens += len(token_ids)
        scored: Sequence[ScoredToken] = ()
        if self._is_scored:
            top = _rows(delta.top_logprobs)
            scored = await self._score(index, token_ids, _floats(delta.logprobs), top)
        return Piece(index=index, text=delta.text, token_ids=token_ids, scored=scored)

    def _read_end(self, first_index: int, end: sampling_pb2.SequenceFinished) -> Piece:
        if end.stop_reason not in _FINISH_REASONS:
            raise Cancelled()
        index = first_index + end.sequence_index
        self.tally.spans[index] = list(end.version_spans)
        return Piece(index=index, text=end.text, finish_reason=_FINISH_REASONS[end.stop_reason])

    @property
    def _is_scored(self) -> bool:
        return self._asked.top_logprobs is not None

    async def _score(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[_Top]
    ) -> list[ScoredToken]:
        if not self._is_scored:
            return []
        rows = top or [()] * len(token_ids)
        met = {*token_ids, *(token_id for row in rows for token_id, _ in row)}
        names = await self._names.of(self._caller, self._base_model, met)
        offsets = self._offsets[index]
        return [
            ScoredToken(
                names[token_id],
                None if math.isnan(logprob) else max(logprob, NEVER_LOGPROB),
                [(names[other], max(other_logprob, NEVER_LOGPROB)) for other, other_logprob in row],
                offsets.before(names[token_id]),
            )
            for token_id, logprob, row in zip(token_ids, logprobs, rows, strict=True)
        ]


class _TextLength:
    """Counts the characters of a growing text whose tokens may end inside a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')
        self._length = 0

    def before(self, name: TokenName) -> int:
        """Return the characters before a token, and count it in."""
        length = self._length
        if not name.is_special:
            self._length += len(self._decoder.decode(name.piece))
        return length

    def go_on(self, names: Iterable[TokenName]) -> None:
        """Count tokens in."""
        for name in names:
            self.before(name)


class JoinedPieces:
    """Puts the pieces of each choice together as they come."""

    def __init__(self) -> None:
        """Begin with none."""
        self._choices: dict[int, _Joined] = {}
        self.logprob_count = 0
        """Log-probabilities in all of them."""

    def add(self, piece: Piece) -> None:
        """Take the next piece of its choice."""
        choice = self._choices.setdefault(piece.index, _Joined())
        choice.text.write(piece.text)
        choice.token_ids.extend(piece.token_ids)
        choice.scored.extend(piece.scored)
        choice.finish_reason = piece.finish_reason
        if piece.prompt_token_ids is not None:
            choice.prompt_token_ids = piece.prompt_token_ids
        self.logprob_count += sum(1 + len(token.top) for token in piece.scored)

    def choices(self) -> list[Piece]:
        """Return one piece for each choice, by index."""
        return [
            Piece(
                index=index,
                text=choice.text.getvalue(),
                token_ids=choice.token_ids,
                scored=choice.scored,
                finish_reason=choice.finish_reason,
                prompt_token_ids=choice.prompt_token_ids,
            )
            for index, choice in sorted(self._choices.items())
        ]


@dataclass
class _Joined:
    text: StringIO = field(default_factory=StringIO)
    token_ids: 'array[int]' = field(default_factory=lambda: array('i'))
    scored: list[ScoredToken] = field(default_factory=list[ScoredToken])
    finish_reason: str | None = None
    prompt_token_ids: Sequence[int] | None = None


def _ints(tensor: tensor_pb2.Tensor) -> list[int]:
    return np.frombuffer(tensor.data, '<i4').tolist()


def _floats(tensor: tensor_pb2.Tensor) -> list[float]:
    return np.frombuffer(tensor.data, '<f4').tolist()


def _rows(top: sampling_pb2.TopLogprobs) -> list[_Top]:
    """Return `(token, logprob)` of each position, cells without a token left out."""
    if not top.HasField('logprobs'):
        return []
    width = top.logprobs.shape[1]
    cells = list(zip(_ints(top.token_ids), _floats(top.logprobs), strict=True))
    rows = (cells[begin : begin + width] for begin in range(0, len(cells), width))
    return [[cell for cell in row if cell[1] > -math.inf] for row in rows]
