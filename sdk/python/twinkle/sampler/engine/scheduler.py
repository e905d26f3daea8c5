"""Which rows the next step computes. Pure: it counts tokens and rows and touches no tensor.

Groups wait in order of arrival. A group is admitted when its sequences have room: a slot each, and
memory for every token they can ever hold, so that nothing running is ever preempted. Each step
continues all running sequences by one row and fills up with prompts, in chunks whose borders depend
on the prompt alone, so that the company a prompt has never changes its numbers.
"""

from collections import deque
from dataclasses import dataclass, field

from twinkle.sampler.engine.sequence import SampleGroup, Sequence


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What one engine may hold and compute at once."""

    max_sequences: int
    """Sequences admitted at once."""
    max_step_rows: int
    """Rows (tokens) computed in one step."""
    prefill_chunk_rows: int
    """Rows of one piece of a prompt."""
    kv_budget_tokens: int
    """Tokens whose keys and values may be held."""

    def __post_init__(self) -> None:
        """Refuse limits under which a prompt could wait for ever.

        Raises:
            ValueError: names the limit and the cure.
        """
        for name in ('max_sequences', 'prefill_chunk_rows', 'kv_budget_tokens'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}')
        if self.max_step_rows < self.max_sequences + self.prefill_chunk_rows:
            raise ValueError(
                f'max_step_rows {self.max_step_rows} leaves no room for a prompt beside running sequences; '
                f'give at least {self.max_sequences + self.prefill_chunk_rows}'
            )


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens `[begin, end)` of a group."""

    group: SampleGroup
    begin: int
    end: int


@dataclass(frozen=True)
class ReplayChunk:
    """The next tokens of a sequence that was begun elsewhere; at least one, and never its newest."""

    sequence: Sequence
    row_count: int


@dataclass(frozen=True)
class StepPlan:
    """What one step computes."""

    decodes: list[Sequence] = field(default_factory=list[Sequence])
    replays: list[ReplayChunk] = field(default_factory=list[ReplayChunk])
    prefills: list[PrefillChunk] = field(default_factory=list[PrefillChunk])

    @property
    def row_count(self) -> int:
        """Rows of the step."""
        replayed = sum(chunk.row_count for chunk in self.replays)
        return len(self.decodes) + replayed + sum(chunk.end - chunk.begin for chunk in self.prefills)


class Scheduler:
    """First come, first served; continuous batching without preemption."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.waiting: deque[SampleGroup] = deque()
        self.prefilling: list[SampleGroup] = []
        self.running: list[Sequence] = []
        self.kv_tokens_reserved = 0

    def largest_group(self, kv_tokens_per_sample: int) -> int:
        """Return how many samples of that size can be admitted together; 0 if not even one."""
        return min(self.limits.max_sequences, self.limits.kv_budget_tokens // kv_tokens_per_sample)

    def add(self, group: SampleGroup) -> None:
        """Let a group wait. It must be no larger than `largest_group` allows."""
        self.waiting.append(group)

    def schedule(self) -> StepPlan:
        """Admit what has room and return the rows of the next step."""
        while self.waiting and self._has_room(self.waiting[0]):
            group = self.waiting.popleft()
            self.kv_tokens_reserved += group.sample_count * group.kv_tokens_per_sample
            self.prefilling.append(group)
        active = [sequence for sequence in self.running if not sequence.group.is_parked]
        decodes = [sequence for sequence in active if sequence.uncomputed_count == 1]
        rows_left = self.limits.max_step_rows - len(decodes)
        replays = self._next_replays([sequence for sequence in active if sequence.uncomputed_count > 1], rows_left)
        return StepPlan(decodes, replays, self._next_chunks(rows_left - sum(chunk.row_count for chunk in replays)))

    def start(self, group: SampleGroup, sequences: list[Sequence]) -> None:
        """Turn a group whose prompt is computed into its running sequences; each holds a share of its room."""
        self.prefilling.remove(group)
        self.running.extend(sequences)
        absent = group.sample_count - len(sequences)
        self.kv_tokens_reserved -= absent * group.kv_tokens_per_sample

    def finish(self, sequence: Sequence) -> None:
        """Give back the room of a sequence."""
        self.running.remove(sequence)
        self.kv_tokens_reserved -= sequence.group.kv_tokens_per_sample

    def remove_group(self, group: SampleGroup) -> None:
        """Forget a group that has not started."""
        if group in self.waiting:
            self.waiting.remove(group)
        else:
            self.start(group, [])

    def _has_room(self, group: SampleGroup) -> bool:
        slots = len(self.running) + sum(other.sample_count for other in self.prefilling)
        kv_tokens = self.kv_tokens_reserved + group.sample_count * group.kv_tokens_per_sample
        return slots + group.sample_count <= self.limits.max_sequences and kv_tokens <= self.limits.kv_budget_tokens

    def _next_replays(self, sequences: list[Sequence], rows_left: int) -> list[ReplayChunk]:
        """Return what fits of the tokens that sequences bring with them; their newest are decoded like any other."""
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
