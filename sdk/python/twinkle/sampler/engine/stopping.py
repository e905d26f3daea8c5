"""When a sequence ends, and which of its text may be shown already."""

from dataclasses import dataclass

from twinkle.data_format import SamplingParams, StopReason
from twinkle.sampler.engine.detokenize import IncrementalDetokenizer


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """What ends the sequences of one request."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, params: SamplingParams, *, eos_token_ids: frozenset[int], max_new_tokens: int) -> 'StopRules':
        """Return the rules of `params` on a model whose sequences end with `eos_token_ids`."""
        own = frozenset(params.stop_token_ids)
        return cls(
            token_ids=own if params.ignore_eos else own | eos_token_ids,
            strings=params.stop_strings,
            min_tokens=params.min_tokens,
            max_tokens=max_new_tokens,
        )

    def forbidden_tokens(self, token_count: int) -> frozenset[int]:
        """Return the tokens that may not be drawn after `token_count` tokens: the stops, up to `min_tokens`."""
        return self.token_ids if token_count < self.min_tokens else frozenset()


@dataclass(frozen=True)
class StopVerdict:
    """What one more token means."""

    text: str
    """Text that became certain."""
    reason: StopReason | None
    """None: the sequence goes on."""


class StopWatch:
    """Follows one sequence: text out, stop strings cut, end decided.

    Text that could be the beginning of a stop string is held back until it is clear. A stop string
    counts only if the token that completes it comes after the first `min_tokens`.
    """

    def __init__(self, rules: StopRules, detokenizer: IncrementalDetokenizer | None) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._token_count = 0
        self._held = ''

    def push(self, token_id: int) -> StopVerdict:
        """Take the next token and decide."""
        self._token_count += 1
        if token_id in self._rules.token_ids and self._token_count > self._rules.min_tokens:
            return StopVerdict(self.release(), StopReason.STOP)
        text = self._held + (self._detokenizer.push(token_id) if self._detokenizer else '')
        stop_at = self._find_stop(text)
        if stop_at is not None:
            self._held = ''
            return StopVerdict(text[:stop_at], StopReason.STOP)
        self._held = _longest_stop_prefix(text, self._rules.strings)
        certain = text[: len(text) - len(self._held)]
        if self._token_count >= self._rules.max_tokens:
            return StopVerdict(certain + self.release(), StopReason.LENGTH)
        return StopVerdict(certain, None)

    def release(self) -> str:
        """Return the text still held back; the sequence has ended."""
        held = self._held + (self._detokenizer.flush() if self._detokenizer else '')
        self._held = ''
        return held

    def _find_stop(self, text: str) -> int | None:
        """Return where the first stop string begins that ends in the new part of `text`."""
        if self._token_count <= self._rules.min_tokens:
            return None
        begins = (text.find(stop, max(0, len(self._held) - len(stop) + 1)) for stop in self._rules.strings)
        return min((begin for begin in begins if begin >= 0), default=None)


def _longest_stop_prefix(text: str, stops: tuple[str, ...]) -> str:
    """Return the longest end of `text` with which one of `stops` begins."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return tail
    return ''
