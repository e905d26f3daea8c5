"""From a seed to how a round is disturbed: which kills, in which order, after how many passes of their place.

Seeds go in rounds of a few, which share one service: starting a process costs more than many operations, and
adapters of other seeds are the neighbours that a pass is shared with.
"""

import random
from collections.abc import Sequence

from fixtures.faulty_service import Kill
from services.kit.failpoints import FAILPOINTS

SEEDS_PER_ROUND = 10
KILLS_PER_ROUND = 5
_LATEST = {
    'journal.payload.written': 2,
    'journal.commit.before': 25,
    'journal.commit.after': 25,
    'snapshot.taken': 5,
    'snapshot.written': 5,
    'snapshot.recorded': 5,
    'state_verb.done': 6,
    'restore.begun': 2,
    'restore.replaying': 6,
    'page_out.recorded': 4,
}
"""The largest count of a failpoint, so that a round of a few seeds comes to it beside the others."""
_LATEST_OPERATION = 30
"""The same of the other failpoints, which every operation comes to, and of answers before a signal."""
_SIGNAL = ''
PLACES = (*FAILPOINTS, _SIGNAL)
"""The last is a signal from outside, at no place in particular."""


def round_of(seed: int) -> int:
    """Return the round that a seed belongs to."""
    return seed // SEEDS_PER_ROUND


def seeds_of(round_number: int) -> range:
    """Return the seeds of a round."""
    return range(round_number * SEEDS_PER_ROUND, (round_number + 1) * SEEDS_PER_ROUND)


def kills_of(round_number: int, *, count: int = KILLS_PER_ROUND) -> list[Kill]:
    """Return the kills of a round; consecutive rounds go through all places in turn."""
    rng = random.Random(round_number)
    places = [PLACES[(round_number * count + index) % len(PLACES)] for index in range(count)]
    return [draw_kill(place, rng) for place in places]


def draw_kill(place: str, rng: random.Random) -> Kill:
    """Return a kill at a place, at a time that a round comes to."""
    return Kill(failpoint=place, count=rng.randint(1, _LATEST.get(place, _LATEST_OPERATION)))


def covered(kills: Sequence[Kill]) -> dict[str, int]:
    """Return how often each place was died at."""
    counts = dict.fromkeys((*FAILPOINTS, 'signal'), 0)
    for kill in kills:
        counts[kill.failpoint or 'signal'] += 1
    return counts
