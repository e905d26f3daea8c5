"""Forms of outputs inside vLLM's engine core: what following one may cost, and where a continued one goes on.

xgrammar follows a form between two steps of the engine, while all other sequences wait, and 28 characters are enough
for one whose every token costs more than the one before: `(a{1,100}){1,100}` took minutes. A sequence whose form
costs too much is ended; nothing else can be done about it from outside.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.sampling_params import SamplingParams

BACKEND = 'xgrammar'
"""What vLLM follows forms with; it is given no other."""
ALLOWANCE_SECONDS = 0.01
"""What a form may cost in each step; on a vocabulary of 49 thousand tokens usual ones take less than one thousandth."""
MOST_DEBT_SECONDS = 0.25
"""By how much the steps of one sequence may go beyond that, all together."""
BEGUN_KEY = 'twinkle_begun'
"""Says in vLLM's `extra_args` how many tokens at the end of the prompt belong to the output."""


class Patience:
    """What one sequence's form has cost beyond its allowance; in seconds of this thread, however busy the machine."""

    def __init__(self) -> None:
        """Begin without debt."""
        self._debt_seconds = 0.0

    @property
    def is_exhausted(self) -> bool:
        """Whether the sequence has to end."""
        return self._debt_seconds > MOST_DEBT_SECONDS

    @contextmanager
    def spending(self, step_count: int = 1) -> Iterator[None]:
        """Count what the block costs, which does the work of so many steps."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self.spend(time.thread_time() - begin, step_count)

    def spend(self, seconds: float, step_count: int = 1) -> None:
        """Count a cost; what steps leave of their allowance pays for those before."""
        self._debt_seconds = max(0.0, self._debt_seconds + seconds - step_count * ALLOWANCE_SECONDS)


def begun_tokens(params: SamplingParams | None, prompt: list[int] | None) -> list[int]:
    """Return the tokens at the end of a prompt that another engine drew as the beginning of this output."""
    count = ((params and params.extra_args) or {}).get(BEGUN_KEY, 0)
    return (prompt or [])[-count:] if count else []
