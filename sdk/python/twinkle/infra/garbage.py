"""Garbage collection during the start of a process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """Pause garbage collection during the block, and exclude the objects that exist at its end from later collections.

    Imports of torch and transformers create 700,000 objects that live as long as the process. Collections would
    traverse them during the imports, later, and at the exit of the process (docs/LOG.md, 2026-11-30). The exclusion
    applies to the whole process, so only services and Ray workers use this function, not programs that import the
    library. A collector that was disabled before the block stays disabled.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
