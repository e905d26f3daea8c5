"""Choices of a response, built from sampler events: text, scored tokens, finish reason, and token usage."""

import codecs
import math
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO

import numpy as np

from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_services.gateway.openai.models import FleetSamplers, IndexedResponse
from twinkle_services.gateway.openai.request import GenerationRequest
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import Cancelled
from twinkle_services.kit.rpc.tensors import tensor_to_proto

MIN_LOGPROB = -9999.0
"""OpenAI's substitute for minus infinity, which JSON cannot represent."""

_FINISH_REASONS = {sampling_pb2.STOP_REASON_LENGTH: 'length', sampling_pb2.STOP_REASON_STOP: 'stop'}
_Top = Sequence[tuple[int, float]]
MAX_VOCABULARIES = 16
"""Maximum number of base models whose token texts are cached."""
_MAX_TOKENS_PER_CALL = 1 << 16


@dataclass(frozen=True)
class TokenText:
    """Text of one token."""

    piece: bytes
    is_special: bool
    """Whether the token is omitted from texts."""

    @property
    def text(self) -> str:
        """Decoded text; incomplete characters become U+FFFD."""
        return self.piece.decode(errors='replace')


class TokenTexts:
    """Cache of token texts by base model; only missing texts are requested from the samplers."""

    def __init__(self, samplers: FleetSamplers) -> None:
        self._samplers = samplers
        self._known: OrderedDict[str, dict[int, TokenText]] = OrderedDict()

    async def get(self, caller: Caller, base_model: str, token_ids: Iterable[int]) -> dict[int, TokenText]:
        """Return the texts of at least these tokens, by token id; callers must not change the mapping.

        Raises:
            DomainError: no sampler could describe the tokens.
        """
        known = self._known.setdefault(base_model, {})
        self._known.move_to_end(base_model)
        if len(self._known) > MAX_VOCABULARIES:
            self._known.popitem(last=False)
        missing = sorted(set(token_ids) - known.keys())
        for begin in range(0, len(missing), _MAX_TOKENS_PER_CALL):
            batch = missing[begin : begin + _MAX_TOKENS_PER_CALL]
            tensor = tensor_to_proto(np.asarray(batch, dtype=np.int32))
            request = wire.DescribeTokensRequest(base_model=base_model, token_ids=tensor)
            response = await self._samplers.describe_tokens(caller, request)
            texts = (TokenText(form.piece, form.is_special) for form in response.tokens)
            known.update(zip(batch, texts, strict=True))
        return known


@dataclass(frozen=True)
class ScoredToken:
    """Token with its log-probability."""

    token: TokenText
    logprob: float | None
    """Natural logarithm; None for the first token of a prompt."""
    top: Sequence[tuple[TokenText, float]]
    """Most likely tokens at this position, most likely first."""
    text_offset: int
    """Number of characters before the token in the choice's text."""


@dataclass(frozen=True, kw_only=True)
class CalledTool:
    """Complete tool call."""

    index: int
    """Position among the calls of the choice."""
    call_id: str
    name: str
    arguments: str
    """JSON object."""


@dataclass(frozen=True, kw_only=True)
class ChoiceDelta:
    """Part of one choice, or the complete choice."""

    index: int
    text: str = ''
    token_ids: Sequence[int] = ()
    """New tokens, without the tokens of an echoed prompt."""
    scored: Sequence[ScoredToken] = ()
    """Scored tokens if requested; the tokens of an echoed prompt come first."""
    calls: Sequence[CalledTool] = ()
    """Calls that are complete."""
    finish_reason: str | None = None
    """None until the choice is complete."""
    prompt_token_ids: Sequence[int] | None = None
    """Tokens of the prompt; only in the first part of a choice."""


@dataclass
class TokenUsage:
    """Token counts of a response, and the adapter versions that produced it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    spans: dict[int, list[sampling_pb2.VersionSpan]] = field(default_factory=dict[int, list[sampling_pb2.VersionSpan]])
    """Adapter versions that produced each finished choice, by the index of the choice."""


class ChoiceReader:
    """Converts the sampler events of one request into parts of choices, in the order of the events."""

    def __init__(self, request: GenerationRequest, base_model: str, caller: Caller, tokens: TokenTexts) -> None:
        self._request = request
        self._base_model = base_model
        self._caller = caller
        self._tokens = tokens
        self._offsets: defaultdict[int, _TextLength] = defaultdict(_TextLength)
        self.usage = TokenUsage()

    async def read(self, indexed: IndexedResponse) -> list[ChoiceDelta]:
        """Return the parts of choices that a response contains.

        Raises:
            Cancelled: a sequence ended for a reason other than its length or a stop condition, such as an abort.
            DomainError: no sampler could describe the tokens.
        """
        prompt_index, response = indexed
        first_index = prompt_index * self._request.sample_count
        match response.WhichOneof('event'):
            case 'prompt':
                return await self._read_prompt(prompt_index, first_index, response.prompt)
            case 'delta':
                return [await self._read_delta(first_index, response.delta)]
            case 'finished':
                return [self._read_finish(first_index, response.finished)]
            case _:
                return []

    async def _read_prompt(
        self, prompt_index: int, first_index: int, prompt: sampling_pb2.PromptInfo
    ) -> list[ChoiceDelta]:
        token_ids = _ints(prompt.token_ids)
        self.usage.prompt_tokens += len(token_ids)
        self.usage.cached_tokens += prompt.cached_token_count
        indices = range(first_index, first_index + self._request.sample_count)
        if not self._request.is_echoed:
            return [ChoiceDelta(index=index, prompt_token_ids=token_ids) for index in indices]
        text = self._request.prompts[prompt_index].text
        if not text:
            texts = await self._tokens.get(self._caller, self._base_model, token_ids)
            pieces = (texts[token_id].piece for token_id in token_ids if not texts[token_id].is_special)
            text = b''.join(pieces).decode(errors='replace')
        # All choices of a prompt share one list of scores.
        scored = await self._score(first_index, token_ids, prompt)
        for index in indices[1:]:
            for score in scored:
                self._offsets[index].add(score.token)
        return [ChoiceDelta(index=index, text=text, scored=scored, prompt_token_ids=token_ids) for index in indices]

    async def _read_delta(self, first_index: int, delta: sampling_pb2.TokenDelta) -> ChoiceDelta:
        index = first_index + delta.sequence_index
        token_ids = _ints(delta.token_ids)
        self.usage.completion_tokens += len(token_ids)
        scored = await self._score(index, token_ids, delta)
        return ChoiceDelta(index=index, text=delta.text, token_ids=token_ids, scored=scored)

    def _read_finish(self, first_index: int, end: sampling_pb2.SequenceFinished) -> ChoiceDelta:
        if end.stop_reason not in _FINISH_REASONS:
            raise Cancelled()
        index = first_index + end.sequence_index
        self.usage.spans[index] = list(end.version_spans)
        return ChoiceDelta(index=index, text=end.text, finish_reason=_FINISH_REASONS[end.stop_reason])

    async def _score(
        self, index: int, token_ids: Sequence[int], scores: sampling_pb2.PromptInfo | sampling_pb2.TokenDelta
    ) -> list[ScoredToken]:
        """Return the tokens with the log-probabilities in `scores`; empty if the client did not request them."""
        if self._request.top_logprobs is None:
            return []
        logprobs = _floats(scores.logprobs)
        rows = _rows(scores.top_logprobs) or [()] * len(token_ids)
        used = {*token_ids, *(token_id for row in rows for token_id, _ in row)}
        texts = await self._tokens.get(self._caller, self._base_model, used)
        offsets = self._offsets[index]
        return [
            ScoredToken(
                texts[token_id],
                None if math.isnan(logprob) else max(logprob, MIN_LOGPROB),
                [(texts[other], max(other_logprob, MIN_LOGPROB)) for other, other_logprob in row],
                offsets.add(texts[token_id]),
            )
            for token_id, logprob, row in zip(token_ids, logprobs, rows, strict=True)
        ]


class _TextLength:
    """Character count of a growing text whose tokens may end within a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')
        self._length = 0

    def add(self, token: TokenText) -> int:
        """Count a token, and return the number of characters before it."""
        length = self._length
        if not token.is_special:
            self._length += len(self._decoder.decode(token.piece))
        return length


class JoinedChoices:
    """Accumulates the parts of each choice."""

    def __init__(self) -> None:
        self._choices: dict[int, _JoinedChoice] = {}
        self.logprob_count = 0
        """Number of log-probabilities of all choices."""

    def add(self, delta: ChoiceDelta) -> None:
        """Append a part to its choice; the finish reason replaces the previous one."""
        choice = self._choices.setdefault(delta.index, _JoinedChoice())
        choice.text.write(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.scored.extend(delta.scored)
        choice.calls.extend(delta.calls)
        choice.finish_reason = delta.finish_reason
        if delta.prompt_token_ids is not None:
            choice.prompt_token_ids = delta.prompt_token_ids
        self.logprob_count += sum(1 + len(score.top) for score in delta.scored)

    def choices(self) -> list[ChoiceDelta]:
        """Return the complete choices, by index."""
        return [
            ChoiceDelta(
                index=index,
                text=choice.text.getvalue(),
                token_ids=choice.token_ids,
                scored=choice.scored,
                calls=choice.calls,
                finish_reason=choice.finish_reason,
                prompt_token_ids=choice.prompt_token_ids,
            )
            for index, choice in sorted(self._choices.items())
        ]


@dataclass
class _JoinedChoice:
    text: StringIO = field(default_factory=StringIO)
    token_ids: 'array[int]' = field(default_factory=lambda: array('i'))
    scored: list[ScoredToken] = field(default_factory=list[ScoredToken])
    calls: list[CalledTool] = field(default_factory=list[CalledTool])
    finish_reason: str | None = None
    prompt_token_ids: Sequence[int] | None = None


def _ints(tensor: tensor_pb2.Tensor) -> list[int]:
    return np.frombuffer(tensor.data, '<i4').tolist()


def _floats(tensor: tensor_pb2.Tensor) -> list[float]:
    return np.frombuffer(tensor.data, '<f4').tolist()


def _rows(top: sampling_pb2.TopLogprobs) -> list[_Top]:
    """Return the `(token, logprob)` pairs at each position, without empty cells."""
    if not top.HasField('logprobs'):
        return []
    width = top.logprobs.shape[1]
    cells = list(zip(_ints(top.token_ids), _floats(top.logprobs), strict=True))
    rows = (cells[begin : begin + width] for begin in range(0, len(cells), width))
    return [[cell for cell in row if cell[1] > -math.inf] for row in rows]
