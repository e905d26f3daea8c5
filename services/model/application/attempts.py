"""Counts attempts at work that may end the process: an abort or a segmentation fault in native code, or lack of memory.

Without a count, work that a client repeats until it is answered would end the process again and again, for all tenants.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.kit.errors import DomainError
from services.model.ports import Journal

MAX_ATTEMPTS = 3
"""Number of attempts during which the process may end. Then the work fails, so that it cannot prevent the service from
serving others."""


@asynccontextmanager
async def attempted(journal: Journal, work: str, *, refusal: DomainError) -> AsyncIterator[None]:
    """Count an attempt durably before the block runs. The count is reset unless the process ends in the block.

    Args:
        journal: Stores the count.
        work: Names the work in the journal.
        refusal: Error of an attempt after `MAX_ATTEMPTS` during which the process ended.

    Raises:
        JournalUnavailable: The attempt could not be counted.
        DomainError: The error `refusal`; the block did not run.
    """
    count = await journal.count_attempt(work)
    try:
        if count > MAX_ATTEMPTS:
            raise refusal
        yield
    finally:
        journal.reset_attempts(work)
