"""One request to vLLM: its sequences, their text and ends, put together to events."""

from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import StructuredOutputsParams

from twinkle.data_format import SamplingParams, StopReason, VersionSpan
from twinkle.sampler.engine.request import PromptEvent, SequenceSoFar, TokenEvent, TopTokens
from twinkle.sampler.engine.stopping import StopRules, StopWatch
from twinkle.sampler.errors import EngineFailed, InvalidSamplingParams
from twinkle.sampler.vllm.adapters import VllmAdapter
from twinkle.sampler.vllm.sampling import top_tokens

_REASONS = {'stop': StopReason.STOP, 'length': StopReason.LENGTH, 'abort': StopReason.ABORT}
"""vLLM's reasons, where ours are not known first; whatever else it says is an error."""


@dataclass(frozen=True, kw_only=True)
class VllmRequest:
    """A prompt with everything needed to continue it."""

    request_id: str
    """Unique among running requests."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: VllmAdapter | None = None
    """None: the base model alone. Otherwise one that this engine has."""
    cache_salt: str = ''
    """Prefixes are shared between requests of the same salt and version only."""
    continued: tuple[SequenceSoFar, ...] = ()
    """Empty: a new request. Otherwise one entry for each sequence, in order."""


@dataclass
class Sequence:
    """One sequence on its way."""

    request_id: str
    index: int
    version: int
    stop_watch: StopWatch
    drawn: tuple[int, ...] = ()
    """Tokens that another engine drew; the reader has them."""
    reason: StopReason | None = None
    """Set where the last of them ended it and the reader was not told."""
    top_count: int = 0
    """Most likely tokens to report beside each drawn one."""
    has_form: bool = False
    """Whether its output has to have a form."""
    is_ended: bool = False

    def __post_init__(self) -> None:
        """Count the tokens so far."""
        self.token_count = len(self.drawn)

    @property
    def engine_id(self) -> str:
        """What vLLM calls it."""
        return f'{self.request_id}/{self.index}'

    def take(self, output: Any) -> TokenEvent | None:
        """Take vLLM's news; return what they mean, None where they bring nothing new.

        Tokens behind the end are dropped: vLLM knows no stop strings, and may be a step ahead.

        Raises:
            InvalidSamplingParams: vLLM gave the sequence up over the form of its output.
            EngineFailed: vLLM gave the sequence up.
        """
        completion = output.outputs[0]
        tokens: list[int] = []
        logprobs: list[TopTokens] = []
        text, reason = '', None
        for place, token_id in enumerate(completion.token_ids):
            verdict = self.stop_watch.push(token_id)
            tokens.append(token_id)
            logprobs.append(top_tokens(completion.logprobs, place, count=self.top_count))
            text, reason = text + verdict.text, verdict.reason
            if reason is not None:
                break
        if reason is None and completion.finish_reason is not None:
            reason = _REASONS.get(completion.finish_reason)
            if reason is None and self.has_form:
                raise InvalidSamplingParams('structured_output', 'no token can follow, or it takes too long to follow')
            if reason is None:
                raise EngineFailed(f'vLLM ended a sequence with {completion.finish_reason!r}')
            text += self.stop_watch.release()
        self.token_count += len(tokens)
        if not tokens and reason is None:
            return None
        return self._event(tokens, logprobs, text, reason)

    def end(self, reason: StopReason) -> TokenEvent:
        """Return the end of a sequence that gets no more tokens."""
        return self._event([], [], self.stop_watch.release(), reason)

    def _event(self, tokens: list[int], logprobs: list[TopTokens], text: str, reason: StopReason | None) -> TokenEvent:
        self.is_ended = reason is not None
        spans = [VersionSpan(version=self.version, begin_token=0, end_token=self.token_count)]
        return TokenEvent(
            request_id=self.request_id,
            sequence_index=self.index,
            tokens=tokens,
            logprobs=logprobs,
            text=text,
            version=self.version,
            stop_reason=reason,
            version_spans=spans if self.is_ended and self.token_count else [],
        )


@dataclass
class Run:
    """A request while it runs."""

    request: VllmRequest
    rules: StopRules
    sequences: list[Sequence]
    form: StructuredOutputsParams | None = None
    """Of its outputs, checked."""
    is_aborted: bool = False

    @property
    def open_sequences(self) -> int:
        """Sequences that have not ended."""
        return sum(not item.is_ended for item in self.sequences)

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompt and completions, those found in the cache too."""
        return len(self.request.prompt_token_ids) + sum(item.token_count for item in self.sequences)


def prompt_event(request: VllmRequest, output: Any) -> PromptEvent:
    """Return the news that the prompt is computed, from the first output of the first sequence."""
    found = output.prompt_logprobs
    wanted = request.params.prompt_logprobs
    cached = output.num_cached_tokens or 0
    if wanted is None or not found:
        return PromptEvent(request_id=request.request_id, cached_tokens=cached)
    entries = [top_tokens(found, place, count=wanted) for place in range(1, len(request.prompt_token_ids))]
    return PromptEvent(
        request_id=request.request_id,
        logprobs=[None, *(entry[0][1] for entry in entries)],
        top_logprobs=[None, *(entry[1:] for entry in entries)] if wanted else None,
        cached_tokens=cached,
    )
