"""Rollouts, groups of them, and statistics of their rewards."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean

MAX_LOGGED = 1024
"""Maximum number of rollouts in a request, and in a group."""
MAX_ROLLOUT_BYTES = 4 << 20
"""Maximum size of a rollout before compression."""
MAX_CHANGED_BYTES = 128 << 20
"""Maximum size of the new rollouts of a request and the stored ones of the same groups together, before compression."""
MAX_PARTS = 16
"""Maximum number of parts of a reward."""
MAX_REASON_LENGTH, PREVIEW_LENGTH = 64, 160
"""Maximum numbers of characters."""
MAX_LISTED_GROUPS = 200
"""Maximum number of groups in a page."""
LISTED_BYTES = 2 << 20
"""Size of the summaries of a page, before compression, at which the page ends."""

GroupKey = tuple[int, str]
"""Step, and id of a group within the step."""


@dataclass(frozen=True, kw_only=True)
class RolloutSummary:
    """Facts of a rollout. None means that a fact is not known."""

    index: int
    """Position in the group."""
    content_bytes: int
    """Size of the rollout before compression."""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    advantage: float | None = None
    finish_reason: str = ''
    prompt_token_count: int | None = None
    completion_token_count: int | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    prompt_preview: str = ''
    completion_preview: str = ''


@dataclass(frozen=True)
class Rollout:
    """A rollout to store."""

    summary: RolloutSummary
    content: bytes
    """The logged rollout as a serialized message of the contract."""


Groups = Mapping[str, Sequence[Rollout]]
"""Rollouts of one step by group, with different indices within a group."""


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """Facts of a stored group."""

    step: int
    group_id: str
    rollouts: Sequence[RolloutSummary]
    """Rollouts by ascending index."""
    update_time: datetime
    """Time at which a rollout of the group was stored last."""

    @property
    def is_degenerate(self) -> bool:
        """Whether the group has several rollouts, and all have the same reward."""
        rewards = {rollout.reward for rollout in self.rollouts}
        return len(self.rollouts) > 1 and len(rewards) == 1 and None not in rewards


@dataclass(frozen=True, kw_only=True)
class StoredRollout:
    """A stored rollout, with the key of its group and the time at which the group changed last."""

    step: int
    group_id: str
    content: bytes
    update_time: datetime


@dataclass(frozen=True, kw_only=True)
class RolloutFilter:
    """Filter for the groups of a run."""

    begin_step: int = 0
    end_step: int | None = None
    """First step that is not listed; None for no limit."""
    group_id: str = ''
    """Group to list in each step; empty for all."""
    is_ascending: bool = False
    """Whether groups of earlier steps are listed first."""


@dataclass(frozen=True, kw_only=True)
class RolloutPage:
    """Groups of a run by step in the order of the filter, and by ascending id within a step."""

    groups: Sequence[GroupSummary]
    next_key: GroupKey | None
    """Key of the last group, if more groups follow."""
    removed_group_count: int
    """Number of groups that were removed to make room for newer ones."""


@dataclass(frozen=True, kw_only=True)
class RewardStatistics:
    """Statistics of finite rewards; all are 0 if there are no such rewards."""

    count: int = 0
    mean: float = 0.0
    standard_deviation: float = 0.0
    minimum: float = 0.0
    maximum: float = 0.0


def statistics_of(rewards: Sequence[float | None]) -> RewardStatistics:
    """Return the statistics of those rewards that are known and finite."""
    finite = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if not finite:
        return RewardStatistics()
    # Rewards are divided first, because sums and squares of large rewards can exceed the range of floats.
    scale = max(*map(abs, finite), 5e-324)
    scaled = [reward / scale for reward in finite]
    mean = fmean(scaled)
    deviation = math.sqrt(fmean([(reward - mean) ** 2 for reward in scaled])) if len(set(finite)) > 1 else 0.0
    low, high = min(finite), max(finite)
    return RewardStatistics(
        count=len(finite),
        mean=min(max(mean * scale, low), high),
        standard_deviation=deviation * scale,
        minimum=low,
        maximum=high,
    )


def statistics_of_parts(rollouts: Sequence[RolloutSummary]) -> dict[str, RewardStatistics]:
    """Return the statistics of each part of the rewards, by name."""
    values = defaultdict[str, list[float]](list)
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            values[name].append(value)
    return {name: statistics_of(values[name]) for name in sorted(values)}


def rollout_id_of(step: int, group_id: str, index: int) -> str:
    """Return the id of a rollout within its run."""
    return f'{step}/{group_id}/{index}'


def parse_rollout_id(rollout_id: str) -> tuple[GroupKey, int] | None:
    """Return the group and the index of a rollout; None if the id has the wrong form."""
    step, _, rest = rollout_id.partition('/')
    group_id, _, index = rest.rpartition('/')
    numbers = [text for text in (step, index) if text.isascii() and text.isdecimal() and len(text) < 17]
    if len(numbers) < 2 or not group_id or rollout_id != rollout_id_of(int(step), group_id, int(index)):
        return None
    return (int(step), group_id), int(index)
