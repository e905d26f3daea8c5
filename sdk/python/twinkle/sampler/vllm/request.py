"""The state of one request to vLLM: its sequences, and the conversion of vLLM's outputs to events."""

from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import StructuredOutputsParams

from twinkle.data_format import ProbeResult, SamplingParams, StopReason, VersionSpan
from twinkle.sampler.engine.request import PromptEvent, SequenceSoFar, TokenEvent, TopTokens
from twinkle.sampler.engine.stopping import StopDetector, StopRules
from twinkle.sampler.errors import EngineFailed, InvalidSamplingParams
from twinkle.sampler.vllm.adapter_slots import VllmAdapter
from twinkle.sampler.vllm.sampling import top_tokens

_REASONS = {'stop': StopReason.STOP, 'length': StopReason.LENGTH, 'abort': StopReason.ABORT}
"""Stop reasons by vLLM's names, used if `StopRules` did not end the sequence. Other reasons are errors."""


@dataclass(frozen=True, kw_only=True)
class VllmRequest:
    """A prompt with all parameters for sampling."""

    request_id: str
    """Unique among running requests."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: VllmAdapter | None = None
    """Adapter version that the engine has loaded. None: the base model."""
    cache_salt: str = ''
    """Prefixes are shared only between requests with the same salt and version."""
    continued: tuple[SequenceSoFar, ...] = ()
    """One entry per sequence of a request that another engine started, in order. Empty: a new request."""


@dataclass
class Sequence:
    """A running sequence."""

    request_id: str
    index: int
    version: int
    stop_detector: StopDetector
    sampled_ids: tuple[int, ...] = ()
    """Tokens sampled by another engine, which the client already received."""
    reason: StopReason | None = None
    """Stop reason, if the last of `sampled_ids` ended the sequence and the client has not received the end."""
    top_count: int = 0
    """Number of most likely tokens to report for each sampled token."""
    is_structured: bool = False
    """Whether structured output is requested."""
    is_ended: bool = False

    def __post_init__(self) -> None:
        self.token_count = len(self.sampled_ids)

    @property
    def engine_id(self) -> str:
        """Id of the sequence in vLLM."""
        return f'{self.request_id}/{self.index}'

    def add(self, output: Any) -> TokenEvent | None:
        """Process an output of vLLM; return an event, or None if there is nothing new.

        Tokens after the end are discarded: vLLM does not receive the stop strings, so it may sample further tokens.

        Raises:
            InvalidSamplingParams: vLLM ended the sequence because of its structured output.
            EngineFailed: vLLM ended the sequence with an error.
        """
        completion = output.outputs[0]
        tokens: list[int] = []
        logprobs: list[TopTokens] = []
        text, reason = '', None
        for position, token_id in enumerate(completion.token_ids):
            decision = self.stop_detector.push(token_id)
            tokens.append(token_id)
            logprobs.append(top_tokens(completion.logprobs, position, count=self.top_count))
            text, reason = text + decision.text, decision.reason
            if reason is not None:
                break
        if reason is None and completion.finish_reason is not None:
            reason = _REASONS.get(completion.finish_reason)
            if reason is None and self.is_structured:
                raise InvalidSamplingParams(
                    'structured_output', 'allows no further token, or takes too long to apply; use a simpler format'
                )
            if reason is None:
                raise EngineFailed(f'vLLM ended a sequence with {completion.finish_reason!r}')
            text += self.stop_detector.release()
        self.token_count += len(tokens)
        if not tokens and reason is None:
            return None
        return self._event(tokens, logprobs, text, reason)

    def end(self, reason: StopReason) -> TokenEvent:
        """Return the event that ends the sequence without a new token."""
        return self._event([], [], self.stop_detector.release(), reason)

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
    """A running request."""

    request: VllmRequest
    rules: StopRules
    sequences: list[Sequence]
    constraint: StructuredOutputsParams | None = None
    """Checked structured output."""
    is_aborted: bool = False
    probe_ids: set[str] = field(default_factory=set[str])
    """vLLM's ids of the sequences that the probe of this request is running."""

    @property
    def open_sequences(self) -> int:
        """Number of sequences that have not ended."""
        return sum(not item.is_ended for item in self.sequences)

    @property
    def computed_tokens(self) -> int:
        """Number of tokens of the prompt and all completions, including cached tokens."""
        return len(self.request.prompt_token_ids) + sum(item.token_count for item in self.sequences)


def prompt_event(run: Run, output: Any, probe: ProbeResult | None) -> PromptEvent:
    """Return the event that reports the computed prompt, from the first output of the first sequence and the probe."""
    request, version = run.request, run.sequences[0].version
    found = output.prompt_logprobs
    wanted = request.params.prompt_logprobs
    cached = output.num_cached_tokens or 0
    if wanted is None or not found:
        return PromptEvent(request_id=request.request_id, probe=probe, cached_tokens=cached, version=version)
    entries = [top_tokens(found, position, count=wanted) for position in range(1, len(request.prompt_token_ids))]
    return PromptEvent(
        request_id=request.request_id,
        logprobs=[None, *(entry[0][1] for entry in entries)],
        top_logprobs=[None, *(entry[1:] for entry in entries)] if wanted else None,
        probe=probe,
        cached_tokens=cached,
        version=version,
    )
