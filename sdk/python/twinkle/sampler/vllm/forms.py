"""Structured output (*forms*) in vLLM's engine core: time limits, and the start of continued outputs.

xgrammar applies a form between two steps of the engine, while all other sequences wait. A short form can have a cost
that grows with each token: `(a{1,100}){1,100}` can take minutes. xgrammar cannot be interrupted, so a
sequence is stopped after its form has cost too much time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.sampling_params import SamplingParams

BACKEND = 'xgrammar'
"""The only backend that vLLM is configured with."""
ALLOWANCE_SECONDS = 0.01
"""Time allowance per step. Typical forms take less than 1 ms with a vocabulary of 49 thousand tokens."""
MAX_DEBT_SECONDS = 0.25
"""Maximum total time by which one sequence may exceed its allowance."""
BEGUN_KEY = 'twinkle_begun'
"""Key in vLLM's `extra_args` for the number of tokens at the end of the prompt that belong to the output."""


class FormBudget:
    """The time by which one sequence's form exceeded its allowance, in CPU seconds of the calling thread."""

    def __init__(self) -> None:
        self._debt_seconds = 0.0

    @property
    def is_exhausted(self) -> bool:
        """Whether the sequence must be stopped."""
        return self._debt_seconds > MAX_DEBT_SECONDS

    @contextmanager
    def spending(self, step_count: int = 1) -> Iterator[None]:
        """Charge the time of the block, which does the work of `step_count` steps."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self.spend(time.thread_time() - begin, step_count)

    def spend(self, seconds: float, step_count: int = 1) -> None:
        """Charge a cost. The unused allowance of later steps reduces the debt of earlier steps."""
        self._debt_seconds = max(0.0, self._debt_seconds + seconds - step_count * ALLOWANCE_SECONDS)


def started_tokens(params: SamplingParams | None, prompt: list[int] | None) -> list[int]:
    """Return the tokens at the end of a prompt that another engine sampled as the start of this output."""
    count = ((params and params.extra_args) or {}).get(BEGUN_KEY, 0)
    return (prompt or [])[-count:] if count else []
