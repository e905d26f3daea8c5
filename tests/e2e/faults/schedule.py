"""Schedules of kills and full disks, which depend only on the seed.

Several seeds form a round and share one service, because a process takes longer to start than many operations take.
Adapters of different seeds then also share passes.
"""

import random
import signal
from collections.abc import Sequence

from fixtures.faulty_cluster import ACTOR, NODE
from fixtures.faulty_mesh import LAUNCHER, RankKill
from fixtures.faulty_service import Kill
from twinkle_services.kit.failpoints import FAILPOINTS

SEEDS_PER_ROUND = 10
"""Number of seeds that share one service."""
KILLS_PER_ROUND = 5
"""Default number of kills of the model service in a round."""
RANK_KILLS_PER_ROUND = 3
"""Number of kills and stops of processes in a round of a mesh."""
_MAX_COUNTS = {
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
"""Largest count of a kill, by failpoint. The counts are so small that a round reaches all its kills."""
_MAX_OPERATIONS = 30
"""Largest count of a kill at any other failpoint, and largest number of responses before a signal or a rank's kill."""
FULL_DISKS_PER_ROUND = 3
"""Number of times in a round at which the disk of the model service is full."""
_MAX_FULL_DISK_RESPONSES = 200
"""Largest number of responses after which the disk of a service is full for a short time."""
DEATHS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV)
"""Signals that end the process: a kill by another process, and two crashes in native code."""
_SIGNAL = ''
"""Empty name of a failpoint, which represents a signal."""
KILL_POINTS = (*FAILPOINTS, _SIGNAL)
"""Names of the failpoints, and the empty name for a signal."""


def round_of(seed: int) -> int:
    """Return the round that a seed belongs to."""
    return seed // SEEDS_PER_ROUND


def seeds_of(round_number: int) -> range:
    """Return the seeds of a round."""
    return range(round_number * SEEDS_PER_ROUND, (round_number + 1) * SEEDS_PER_ROUND)


def kills_of(round_number: int, *, count: int = KILLS_PER_ROUND) -> list[Kill]:
    """Return the kills of a round; consecutive rounds cycle through all kill points."""
    rng = random.Random(round_number)
    points = [KILL_POINTS[(round_number * count + index) % len(KILL_POINTS)] for index in range(count)]
    return [choose_kill(point, rng) for point in points]


def rank_kills_of(round_number: int, *, is_on_ray: bool = False) -> list[RankKill]:
    """Return the kills of a round of a mesh.

    Consecutive rounds use, in turn, SIGKILL and SIGSTOP of the ranks 0 and 1 and SIGKILL of the launcher. On Ray, they
    also use SIGKILL of the actor and of the node.
    """
    rng = random.Random(f'ranks {round_number}')
    # No process replaces a stopped launcher, so the launcher is only killed.
    choices = [('0', signal.SIGKILL), ('1', signal.SIGKILL), (LAUNCHER, signal.SIGKILL)]
    choices += [('0', signal.SIGSTOP), ('1', signal.SIGSTOP)]
    if is_on_ray:
        choices += [(NODE, signal.SIGKILL), (ACTOR, signal.SIGKILL)]
    first = round_number * RANK_KILLS_PER_ROUND
    chosen = [choices[(first + index) % len(choices)] for index in range(RANK_KILLS_PER_ROUND)]
    return [RankKill(target=name, count=rng.randint(1, _MAX_OPERATIONS), death=death) for name, death in chosen]


def choose_kill(point: str, rng: random.Random) -> Kill:
    """Return a kill at `point` with a random signal and a random count that a round reaches."""
    count = rng.randint(1, _MAX_COUNTS.get(point, _MAX_OPERATIONS))
    return Kill(failpoint=point, count=count, death=rng.choice(DEATHS))


def full_disks_of(round_number: int) -> list[int]:
    """Return the numbers of responses after which the disk of the model service is full in a round."""
    return random.Random(f'disk {round_number}').sample(range(1, _MAX_FULL_DISK_RESPONSES), FULL_DISKS_PER_ROUND)


def count_kills(kills: Sequence[Kill]) -> dict[str, int]:
    """Return the number of kills at each failpoint and by signals."""
    counts = dict.fromkeys((*FAILPOINTS, 'signal'), 0)
    for kill in kills:
        counts[kill.failpoint or 'signal'] += 1
    return counts
