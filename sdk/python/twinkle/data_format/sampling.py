"""Sampling requests and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinkle.data_format.input_feature import InputFeature
from twinkle.data_format.prompt_probe import ProbeResult, PromptProbe


class StopReason(StrEnum):
    """Reason why a sequence ended."""

    LENGTH = 'length'
    """The sequence reached `max_tokens` or the model's context."""
    STOP = 'stop'
    """The model produced an end-of-sequence token, or a token or string of `stop`."""
    ABORT = 'abort'
    """The caller cancelled the request."""
    ERROR = 'error'
    """The engine failed."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """Form that a completion must have. Exactly one field is set. An engine may not support every form."""

    json_schema: Mapping[str, Any] | None = None
    """A JSON document that is valid under this JSON schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches completely."""
    choices: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text that this context-free grammar generates, in the notation of the engine (EBNF for vLLM)."""

    def __post_init__(self) -> None:
        """Validate the form.

        Raises:
            ValueError: not exactly one field is set, or a string or list is empty.
        """
        given = [name for name in ('json_schema', 'regex', 'choices', 'grammar') if getattr(self, name) is not None]
        given += ['json_object'] if self.json_object else []
        if len(given) != 1:
            raise ValueError(
                f'structured_output must set exactly one of json_schema, json_object, regex, choices and grammar, got '
                f'{given or "none"}'
            )
        if given[0] in {'regex', 'choices', 'grammar'} and not getattr(self, given[0]):
            raise ValueError(f'structured_output.{given[0]} must not be empty')

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> 'StructuredOutput':
        """Create a form from a mapping of field names to values.

        Raises:
            ValueError: a key is unknown, not exactly one field is set, or a string or list is empty.
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
    """Parameters of sampling."""

    max_tokens: int | None = None
    """Maximum number of new tokens of a sequence. If None, the model's context is the limit. 0 computes only
    log-probabilities of the prompt."""
    min_tokens: int = 0
    """Minimum number of new tokens before a stop token or string ends a sequence."""
    seed: int | None = None
    """Makes sampling reproducible: sequence `i` of a request uses the random stream `(seed, i)`. If None, sampling is
    random."""
    stop: str | int | Sequence[str | int] | None = None
    """Strings or token ids that end a sequence. A stop string is removed from the text."""
    temperature: float = 1.0
    """Divides the logits; 0 selects the most likely token."""
    top_k: int = -1
    """Keeps only the k most likely tokens; -1 keeps all."""
    top_p: float = 1.0
    """Keeps only the smallest set of most likely tokens whose probability reaches this value, in (0, 1]."""
    repetition_penalty: float = 1.0
    """Penalizes tokens that are already present: values above 1 make them less likely."""
    logprobs: int | None = None
    """Number of most likely tokens to return for each position. None: 0. The sampled token is always returned."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return for each prompt token, in addition to its log-probability. 0 returns only
    the log-probabilities. If unset, neither is returned."""
    num_samples: int = 1
    """Number of sequences for each prompt."""
    ignore_eos: bool = False
    """Whether to continue after the model's end-of-sequence tokens."""
    min_p: float = 0.0
    """Keeps only tokens whose probability is at least this fraction, in [0, 1], of the highest probability."""
    presence_penalty: float = 0.0
    """Value subtracted from the logit of each token that was sampled before, -2 to 2."""
    frequency_penalty: float = 0.0
    """Value subtracted from the logit of each token for each time that it was sampled before, -2 to 2."""
    structured_output: StructuredOutput | None = None
    """Form that the completion must have. If None, the form is free."""
    prompt_probe: PromptProbe | None = None
    """Values to compute for the prompt, if any."""
    return_routed_experts: bool = False
    """Whether to return the experts of each token, for routing replay in training. Needs a mixture of experts."""

    def __post_init__(self) -> None:
        """Validate the values.

        Raises:
            ValueError: a value is out of range. The message names the field and the range.
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
        """Create parameters from a mapping of field names to values.

        Raises:
            ValueError: a key is unknown, or a value is out of range.
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
    """Tokens `[begin_token, end_token)` of a sequence, all sampled with one adapter version."""

    version: int
    """Version of the adapter, or of base weights that replaced the original weights. 0 is the original base model."""
    begin_token: int
    end_token: int


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """A completion. Like a dict, it also returns its fields by name with `get`."""

    stop_reason: StopReason
    tokens: list[int]
    """The new tokens, including a stop token that ended the sequence."""
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    """Pairs `(token_id, natural log-probability)` for each new token: first the sampled token, then the k most likely
    tokens. Probabilities refer to the model's own distribution, before temperature and filters."""
    decoded: str = ''
    """The new tokens as text, without special tokens."""
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    """Adapter versions that sampled the tokens, in order. The spans cover all tokens."""
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    """int [P + N - 1, layers with experts, experts per token]: experts of the P tokens of the prompt and of the N new
    tokens except the last, which was not computed. None unless requested."""
    new_input_feature: InputFeature | None = None
    """Prompt and completion as a training feature, with labels for the completion and the prompt's own labels."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field `name`, or `default` if there is no such field."""
        return getattr(self, name) if name in self.__dataclass_fields__ else default


def extended_experts(
    earlier: npt.NDArray[np.integer[Any]] | None, sampled: npt.NDArray[np.integer[Any]] | None
) -> npt.NDArray[np.integer[Any]] | None:
    """Return the experts of a prompt and its completion.

    Args:
        earlier: experts of the first tokens of the prompt, which are kept because earlier turns were sampled with them.
        sampled: see `SampledSequence.routed_experts`.
    """
    if earlier is None or sampled is None:
        return sampled if earlier is None else earlier
    return np.concatenate([earlier, sampled[len(earlier) :]])


@dataclass(frozen=True, kw_only=True)
class SampleResponse:
    """Completions of one prompt."""

    sequences: list[SampledSequence]
    prompt_token_ids: list[int] = field(default_factory=list[int])
    prompt_logprobs: list[float | None] | None = None
    """Natural log-probability of each prompt token given the tokens before it. The first element is `None`."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """Pairs `(token_id, natural log-probability)` of the most likely tokens at each position of the prompt, if
    requested. The first element is `None`."""
    prompt_probe: ProbeResult | None = None
    """Values that the probe of the prompt requested."""


class SampleResults(list[SampleResponse]):
    """Responses in the order of their prompts; also usable as one response with the sequences of all prompts."""

    @property
    def sequences(self) -> list[SampledSequence]:
        """Completions of all prompts, in the order of the prompts."""
        return [sequence for response in self for sequence in response.sequences]

    def get(self, name: str, default: Any = None) -> Any:
        """Return `sequences` if `name` is 'sequences', otherwise `default`."""
        return self.sequences if name == 'sequences' else default
