"""Continuation of sequences that another engine started, after the tokens that the client already received."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinkle.data_format import SamplingParams, StopReason
from twinkle.sampler.engine.request import SequenceSoFar
from twinkle.sampler.engine.stopping import StopDetector
from twinkle.sampler.errors import InvalidContinuation


@dataclass(frozen=True)
class Replay:
    """A started sequence in the state that it would have if this engine had sampled its tokens."""

    tokens: tuple[int, ...]
    stop_detector: StopDetector
    """Stop rules after processing `tokens`. The client has not received the withheld text."""
    reason: StopReason | None
    """Stop reason, if the last token ended the sequence and the client has not received the end."""


def check_continued(
    continued: Sequence[SequenceSoFar], params: SamplingParams, *, vocab_size: int, max_new_tokens: int
) -> None:
    """Check that the given sequences can be the start of this request.

    Raises:
        InvalidContinuation: the number of entries is wrong, or an entry has too many or invalid tokens.
    """
    if len(continued) != params.num_samples:
        raise InvalidContinuation(f'must have {params.num_samples} entries, one per sequence, got {len(continued)}')
    for index, so_far in enumerate(continued):
        if len(so_far.token_ids) > max_new_tokens:
            raise InvalidContinuation(
                f'entry {index} has {len(so_far.token_ids)} tokens, the limit is {max_new_tokens}'
            )
        wrong = [token_id for token_id in so_far.token_ids if not 0 <= token_id < vocab_size]
        if wrong:
            raise InvalidContinuation(f'entry {index}: token ids must be from 0 to {vocab_size - 1}, got {wrong[0]}')


def replay(continued: Sequence[SequenceSoFar], new_stop_detector: Callable[[], StopDetector]) -> dict[int, Replay]:
    """Replay the tokens of all unfinished sequences, and return the resulting states by the index of the sequence.

    Raises:
        InvalidContinuation: an entry has tokens after a token that ends the sequence.
    """
    replays: dict[int, Replay] = {}
    for index, so_far in enumerate(continued):
        if so_far.is_finished:
            continue
        detector, reason = new_stop_detector(), None
        for position, token_id in enumerate(so_far.token_ids):
            if reason is not None:
                raise InvalidContinuation(
                    f'entry {index} has tokens after token {position - 1}, which ends the sequence'
                )
            reason = detector.push(token_id).reason
        replays[index] = Replay(so_far.token_ids, detector, reason)
    return replays
