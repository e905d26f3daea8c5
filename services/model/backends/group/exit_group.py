"""Ends a process whose group cannot continue, after a defect or the loss of another process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import structlog

from twinkle_services.kit.errors import DomainError

LOST_STATUS = 75
"""Exit status of a process whose group cannot continue."""
_log = structlog.get_logger('engine')


@contextmanager
def exit_on_defect() -> Iterator[None]:
    """End this process if the block raises an error other than DomainError."""
    try:
        yield
    except DomainError:
        raise
    except Exception as error:
        exit_group(str(error), error)


def exit_group(problem: str, error: Exception | None = None) -> NoReturn:
    """End this process without cleanup, because the thread of its engine may be waiting for a lost process."""
    _log.error('mesh failed; all of its processes exit', problem=problem, exc_info=error)
    os._exit(LOST_STATUS)
