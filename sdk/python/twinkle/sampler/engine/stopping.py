"""Stop rules: when a sequence ends, and which part of its text can be reported."""

from bisect import bisect_left
from dataclasses import dataclass

from twinkle.data_format import SamplingParams, StopReason
from twinkle.sampler.engine.detokenize import IncrementalDetokenizer


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """The stop conditions of one request."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    """Stop strings, sorted."""
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, params: SamplingParams, *, eos_token_ids: frozenset[int], max_new_tokens: int) -> 'StopRules':
        """Return the rules for `params` on a model with the given end-of-sequence tokens."""
        stop_ids = frozenset(params.stop_token_ids)
        return cls(
            token_ids=stop_ids if params.ignore_eos else stop_ids | eos_token_ids,
            strings=tuple(sorted(params.stop_strings)),
            min_tokens=params.min_tokens,
            max_tokens=max_new_tokens,
        )

    def forbidden_tokens(self, token_count: int) -> frozenset[int]:
        """Return the tokens that must not be sampled next: the stop tokens until `min_tokens` is reached."""
        return self.token_ids if token_count < self.min_tokens else frozenset()


@dataclass(frozen=True)
class StopDecision:
    """The result of processing one token."""

    text: str
    """New text to report."""
    reason: StopReason | None
    """Stop reason. None: the sequence continues."""


class StopDetector:
    """Converts the tokens of one sequence to text, removes stop strings and detects the end.

    Text that could be the start of a stop string is withheld until later tokens complete or exclude it. A stop string
    ends the sequence only if the token that completes it follows the first `min_tokens` tokens.
    """

    def __init__(self, rules: StopRules, detokenizer: IncrementalDetokenizer | None) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._token_count = 0
        self._withheld = ''

    def push(self, token_id: int) -> StopDecision:
        """Process the next token."""
        self._token_count += 1
        if token_id in self._rules.token_ids and self._token_count > self._rules.min_tokens:
            return StopDecision(self.release(), StopReason.STOP)
        text = self._withheld + (self._detokenizer.push(token_id) if self._detokenizer else '')
        stop_at = self._find_stop(text)
        if stop_at is not None:
            self._withheld = ''
            return StopDecision(text[:stop_at], StopReason.STOP)
        self._withheld = _longest_stop_prefix(text, self._rules.strings)
        ready = text[: len(text) - len(self._withheld)]
        if self._token_count >= self._rules.max_tokens:
            return StopDecision(ready + self.release(), StopReason.LENGTH)
        return StopDecision(ready, None)

    def release(self) -> str:
        """Return and clear the withheld text; call this once the sequence has ended."""
        withheld = self._withheld + (self._detokenizer.flush() if self._detokenizer else '')
        self._withheld = ''
        return withheld

    def _find_stop(self, text: str) -> int | None:
        """Return the start of the first stop string that ends in the new part of `text`; None without a stop string."""
        if self._token_count <= self._rules.min_tokens:
            return None
        begins = (text.find(stop, max(0, len(self._withheld) - len(stop) + 1)) for stop in self._rules.strings)
        return min((begin for begin in begins if begin >= 0), default=None)


def _longest_stop_prefix(text: str, stops: tuple[str, ...]) -> str:
    """Return the longest suffix of `text` that is a prefix of one of `stops`, which are sorted.

    The strings with a certain prefix are adjacent in `stops`, so a binary search for the prefix finds the first one.
    """
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        first = bisect_left(stops, tail)
        if first < len(stops) and stops[first].startswith(tail):
            return tail
    return ''
