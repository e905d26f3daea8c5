"""What is asked of a sampler and what comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, cast

from twinkle.data_format.input_feature import InputFeature


class StopReason(StrEnum):
    """Why a sequence ended."""

    LENGTH = 'length'
    """`max_tokens` or the model's context was reached."""
    STOP = 'stop'
    """The end-of-sequence token or one of `stop` was produced."""
    ABORT = 'abort'
    """The caller cancelled."""
    ERROR = 'error'
    """The engine failed."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The form a completion has to have; exactly one field is set. Not every engine can hold it."""

    json_schema: Mapping[str, Any] | None = None
    """A JSON document that this JSON schema describes."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches as a whole."""
    choices: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text of this context-free grammar, in the engine's notation (EBNF for vLLM)."""

    def __post_init__(self) -> None:
        """Refuse none and several.

        Raises:
            ValueError: not exactly one form is given, or it is empty.
        """
        given = [name for name in ('json_schema', 'regex', 'choices', 'grammar') if getattr(self, name) is not None]
        given += ['json_object'] if self.json_object else []
        if len(given) != 1:
            raise ValueError(f'structured_output needs exactly one form, got {given or "none"}')
        if given[0] in {'regex', 'choices', 'grammar'} and not getattr(self, given[0]):
            raise ValueError(f'structured_output.{given[0]} must not be empty')

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> 'StructuredOutput':
        """Build from a mapping of field names.

        Raises:
            ValueError: a key is no field, or not exactly one form is given.
        """
        known = sorted(item.name for item in fields(cls))
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f'structured_output has unknown fields {unknown}; known are {known}')
        given = dict(values)
        if given.get('choices') is not None:
            given['choices'] = tuple(given['choices'])
        return cls(**given)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw tokens from the model's distribution."""

    max_tokens: int | None = None
    """Most new tokens a sequence may have. Unset: up to the model's context. 0: logprobs only."""
    min_tokens: int = 0
    """Fewest new tokens before a stop token or string may end a sequence."""
    seed: int | None = None
    """Makes sampling repeatable; sequence `i` of a request draws from `(seed, i)`. Unset: random."""
    stop: str | int | Sequence[str | int] | None = None
    """Strings or token ids that end a sequence; a stop string is cut from the text."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this, in (0, 1]."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens already present less likely."""
    logprobs: int | None = None
    """Also report the k most likely tokens of each position. The sampled token's own is always given."""
    prompt_logprobs: int | None = None
    """0: report the prompt tokens' log-probabilities; k: and the k most likely at each position."""
    num_samples: int = 1
    """Sequences drawn for each prompt."""
    ignore_eos: bool = False
    """Do not stop at the model's own end of sequence."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the most likely one's probability, in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token drawn before, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of each token as often as it was drawn before, -2 to 2."""
    structured_output: StructuredOutput | None = None
    """The form of the completion. Unset: free."""

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            ValueError: names the field and the range.
        """
        checks = (
            ('max_tokens', self.max_tokens is None or self.max_tokens >= 0, 'at least 0'),
            ('min_tokens', self.min_tokens >= 0, 'at least 0'),
            ('temperature', 0.0 <= self.temperature < float('inf'), 'at least 0 and finite'),
            ('top_k', self.top_k == -1 or self.top_k >= 1, '-1 or at least 1'),
            ('top_p', 0.0 < self.top_p <= 1.0, 'in (0, 1]'),
            ('repetition_penalty', 0.0 < self.repetition_penalty < float('inf'), 'positive and finite'),
            ('logprobs', self.logprobs is None or self.logprobs >= 0, 'at least 0'),
            ('prompt_logprobs', self.prompt_logprobs is None or self.prompt_logprobs >= 0, 'at least 0'),
            ('num_samples', self.num_samples >= 1, 'at least 1'),
            ('min_p', 0.0 <= self.min_p <= 1.0, 'in [0, 1]'),
            ('presence_penalty', -2.0 <= self.presence_penalty <= 2.0, '-2 to 2'),
            ('frequency_penalty', -2.0 <= self.frequency_penalty <= 2.0, '-2 to 2'),
        )
        for name, is_legal, range_text in checks:
            if not is_legal:
                raise ValueError(f'{name} must be {range_text}, got {getattr(self, name)}')

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> 'SamplingParams':
        """Build from a mapping of field names.

        Raises:
            ValueError: a key is no field, or a value is out of range.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f'unknown sampling parameters {unknown}; known are {sorted(known)}')
        form = values.get('structured_output')
        if isinstance(form, Mapping):
            values = {**values, 'structured_output': StructuredOutput.from_dict(cast(Mapping[str, Any], form))}
        return cls(**values)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings among `stop`."""
        return tuple(item for item in self._stop_items() if isinstance(item, str))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token ids among `stop`."""
        return tuple(item for item in self._stop_items() if isinstance(item, int))

    def _stop_items(self) -> tuple[str | int, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str | int) else tuple(self.stop)


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens `[begin_token, end_token)` of a sequence were produced by adapter version `version`."""

    version: int
    """Adapter version; 0 is the base model without an adapter."""
    begin_token: int
    end_token: int


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """One completion; its fields may also be had by `get`, as from a dict."""

    stop_reason: StopReason
    tokens: list[int]
    """The new tokens, the stop token included where one ended the sequence."""
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    """Per new token `(token_id, natural log-probability)`, the sampled token first, then the top k.
    Taken from the model's own distribution, before temperature and filters."""
    decoded: str = ''
    """The new tokens as text, special tokens left out."""
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    """Which adapter version produced which tokens; covers every token."""
    new_input_feature: InputFeature | None = None
    """Prompt and completion as a training feature: labels on the completion only."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, else `default`."""
        return getattr(self, name) if name in self.__dataclass_fields__ else default


@dataclass(frozen=True, kw_only=True)
class SampleResponse:
    """The completions of one prompt."""

    sequences: list[SampledSequence]
    prompt_token_ids: list[int] = field(default_factory=list[int])
    prompt_logprobs: list[float | None] | None = None
    """Per prompt token its natural log-probability given those before it; the first is None."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


class SampleResults(list[SampleResponse]):
    """One response for each prompt, in the order of the prompts; may also be read as one response of them all."""

    @property
    def sequences(self) -> list[SampledSequence]:
        """The completions of all prompts, those of the first prompt first."""
        return [sequence for response in self for sequence in response.sequences]

    def get(self, name: str, default: Any = None) -> Any:
        """Return `sequences` by name, else `default`."""
        return self.sequences if name == 'sequences' else default
