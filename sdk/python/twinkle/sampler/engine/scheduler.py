"""Selection of the rows of the next step. The scheduler counts tokens and rows and does not access tensors.

Sample groups wait in order of arrival. A group is admitted when each of its sequences has a slot and memory for its
maximum number of tokens, so running sequences are never preempted. Each step computes one row of every running sequence
that is neither parked nor replayed, and fills the remaining rows with chunks, first of replayed sequences and then of
prompts. The chunk boundaries of a prompt depend only on the prompt, so other requests do not affect its numerical
results.
"""

from collections import deque
from dataclasses import dataclass, field

from twinkle.sampler.engine.sequence import SampleGroup, Sequence


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Limits of the scheduler."""

    max_sequences: int
    """Maximum number of admitted sequences."""
    max_step_rows: int
    """Maximum number of rows (tokens) in one step."""
    prefill_chunk_rows: int
    """Maximum number of rows of one prompt chunk."""
    cache_budget_bytes: int
    """Maximum memory of the caches of all admitted sequences."""

    def __post_init__(self) -> None:
        """Check that every prompt can be scheduled.

        Raises:
            ValueError: a limit is too small. The message names the limit and its minimum.
        """
        for name in ('max_sequences', 'prefill_chunk_rows', 'cache_budget_bytes'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}')
        if self.max_step_rows < self.max_sequences + self.prefill_chunk_rows:
            raise ValueError(
                f'max_step_rows (max_batch_tokens of the engine) must be at least '
                f'{self.max_sequences + self.prefill_chunk_rows}, so that a step has '
                f'capacity for a prompt chunk in addition to all running sequences, got {self.max_step_rows}'
            )


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens `[begin, end)` of a group."""

    group: SampleGroup
    begin: int
    end: int


@dataclass(frozen=True)
class ReplayChunk:
    """Tokens of a sequence that another engine started, which are computed again; never its newest token."""

    sequence: Sequence
    row_count: int


@dataclass(frozen=True)
class StepPlan:
    """The rows that one step computes."""

    decodes: list[Sequence] = field(default_factory=list[Sequence])
    replays: list[ReplayChunk] = field(default_factory=list[ReplayChunk])
    prefills: list[PrefillChunk] = field(default_factory=list[PrefillChunk])

    @property
    def row_count(self) -> int:
        """Number of rows of the step."""
        replayed = sum(chunk.row_count for chunk in self.replays)
        return len(self.decodes) + replayed + sum(chunk.end - chunk.begin for chunk in self.prefills)


class Scheduler:
    """First-come, first-served continuous batching without preemption."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.waiting: deque[SampleGroup] = deque()
        self.prefilling: list[SampleGroup] = []
        self.running: list[Sequence] = []
        self.cache_bytes_reserved = 0

    def largest_group(self, cache_bytes_per_sample: int) -> int:
        """Return the number of samples with caches of this size that fit together; 0 if one cache is too large."""
        return min(self.limits.max_sequences, self.limits.cache_budget_bytes // cache_bytes_per_sample)

    def add(self, group: SampleGroup) -> None:
        """Add a group to the queue. The group must not be larger than `largest_group` allows."""
        self.waiting.append(group)

    def schedule(self) -> StepPlan:
        """Admit groups while there is capacity, and return the rows of the next step."""
        while self.waiting and self._has_capacity(self.waiting[0]):
            group = self.waiting.popleft()
            self.cache_bytes_reserved += group.sample_count * group.cache_bytes_per_sample
            self.prefilling.append(group)
        active = [sequence for sequence in self.running if not sequence.group.is_parked]
        decodes = [sequence for sequence in active if sequence.uncomputed_count == 1]
        rows_left = self.limits.max_step_rows - len(decodes)
        replays = self._next_replays([sequence for sequence in active if sequence.uncomputed_count > 1], rows_left)
        return StepPlan(decodes, replays, self._next_chunks(rows_left - sum(chunk.row_count for chunk in replays)))

    def start(self, group: SampleGroup, sequences: list[Sequence]) -> None:
        """Remove a group whose prompt is computed, and run its sequences, which keep their reserved memory."""
        self.prefilling.remove(group)
        self.running.extend(sequences)
        unused_count = group.sample_count - len(sequences)
        self.cache_bytes_reserved -= unused_count * group.cache_bytes_per_sample

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence and release its reserved memory."""
        self.running.remove(sequence)
        self.cache_bytes_reserved -= sequence.group.cache_bytes_per_sample

    def remove_group(self, group: SampleGroup) -> None:
        """Remove a group that has not started."""
        if group in self.waiting:
            self.waiting.remove(group)
        else:
            self.start(group, [])

    def _has_capacity(self, group: SampleGroup) -> bool:
        slots = len(self.running) + sum(other.sample_count for other in self.prefilling)
        cache_bytes = self.cache_bytes_reserved + group.sample_count * group.cache_bytes_per_sample
        return slots + group.sample_count <= self.limits.max_sequences and cache_bytes <= self.limits.cache_budget_bytes

    def _next_replays(self, sequences: list[Sequence], rows_left: int) -> list[ReplayChunk]:
        """Return the chunks to replay that fit the step. The newest token of a sequence is decoded normally."""
        replays: list[ReplayChunk] = []
        for sequence in sequences:
            row_count = min(sequence.uncomputed_count - 1, self.limits.prefill_chunk_rows, rows_left)
            if row_count:
                replays.append(ReplayChunk(sequence, row_count))
            rows_left -= row_count
        return replays

    def _next_chunks(self, rows_left: int) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        for group in self.prefilling:
            end = min(group.computed_tokens + self.limits.prefill_chunk_rows, group.prompt_length)
            if end - group.computed_tokens > rows_left:
                break
            chunks.append(PrefillChunk(group, group.computed_tokens, end))
            rows_left -= end - group.computed_tokens
        return chunks
