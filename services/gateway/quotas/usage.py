"""What tenants use: counts of work that was done, by tenant, run and hour."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much was done. All of it adds up."""

    trained_token_count: int = 0
    sampled_token_count: int = 0
    prompt_token_count: int = 0
    operation_count: int = 0
    """Training operations whose numbers were used up."""
    prompt_count: int = 0
    """Prompts that were sampled from, and sequences that were scored."""

    def __add__(self, other: 'Work') -> 'Work':
        return Work(
            trained_token_count=self.trained_token_count + other.trained_token_count,
            sampled_token_count=self.sampled_token_count + other.sampled_token_count,
            prompt_token_count=self.prompt_token_count + other.prompt_token_count,
            operation_count=self.operation_count + other.operation_count,
            prompt_count=self.prompt_count + other.prompt_count,
        )

    @property
    def token_count(self) -> int:
        """All tokens, of whatever kind."""
        return self.trained_token_count + self.sampled_token_count + self.prompt_token_count


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A run's meter at the model service: how much was trained since it began. It never goes back."""

    run_id: str
    tenant_id: str
    trained_token_count: int
    operation_count: int


@dataclass(frozen=True, kw_only=True)
class UsageBatch:
    """Work that is to be written down together, once."""

    writer_id: str
    """Who counted it; no two processes have the same."""
    number: int
    """Counts from 1 with each batch of the writer's, so that one that comes twice is written down once."""
    moment: datetime
    """UTC; the work is put down for its hour."""
    works: tuple[tuple[str, str, Work], ...] = ()
    """Tenant, run and what was done; each pair once."""
    readings: tuple[Reading, ...] = ()
    """The newest of each run."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a tenant used of one run's weights."""

    run_id: str
    """Empty: of the base models alone."""
    work: Work
    stored_bytes: int
    """Of the checkpoints that are kept now."""


def hour_of(moment: datetime) -> datetime:
    """Return when the hour of a moment began."""
    return moment.replace(minute=0, second=0, microsecond=0)
