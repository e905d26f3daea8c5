"""Sequences that another engine began, taken up where their reader has them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinkle.data_format import SamplingParams, StopReason
from twinkle.sampler.engine.request import SequenceSoFar
from twinkle.sampler.engine.stopping import StopWatch
from twinkle.sampler.errors import InvalidContinuation


@dataclass(frozen=True)
class Replay:
    """A sequence as if this engine had drawn its tokens."""

    tokens: tuple[int, ...]
    stop_watch: StopWatch
    """Has taken `tokens`; what it holds back was not shown before."""
    reason: StopReason | None
    """Set where the last of `tokens` ended the sequence and its reader was not told."""


def check_continued(
    continued: Sequence[SequenceSoFar], params: SamplingParams, *, vocab_size: int, max_new_tokens: int
) -> None:
    """Refuse what cannot be the beginning of this request.

    Raises:
        InvalidContinuation: there is not one entry for each sequence, or its tokens are none or too many.
    """
    if len(continued) != params.num_samples:
        raise InvalidContinuation(f'has {len(continued)} entries for {params.num_samples} sequences')
    for index, so_far in enumerate(continued):
        if len(so_far.token_ids) > max_new_tokens:
            raise InvalidContinuation(f'entry {index} has {len(so_far.token_ids)} tokens of at most {max_new_tokens}')
        wrong = [token_id for token_id in so_far.token_ids if not 0 <= token_id < vocab_size]
        if wrong:
            raise InvalidContinuation(f'entry {index} has token {wrong[0]}; tokens are 0 to {vocab_size - 1}')


def replay(continued: Sequence[SequenceSoFar], new_stop_watch: Callable[[], StopWatch]) -> dict[int, Replay]:
    """Return the sequences that have not ended, by index.

    Raises:
        InvalidContinuation: tokens go on behind one that ends their sequence.
    """
    replays: dict[int, Replay] = {}
    for index, so_far in enumerate(continued):
        if so_far.is_finished:
            continue
        watch, reason = new_stop_watch(), None
        for place, token_id in enumerate(so_far.token_ids):
            if reason is not None:
                raise InvalidContinuation(f'entry {index} goes on behind token {place - 1}, which ends it')
            reason = watch.push(token_id).reason
        replays[index] = Replay(so_far.token_ids, watch, reason)
    return replays
