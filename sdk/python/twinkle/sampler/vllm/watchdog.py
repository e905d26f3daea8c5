"""Ends vLLM's processes with the one that owns them.

vLLM's engine core waits for ever when its owner is killed with -9, and keeps the model's memory. The
owner names itself in the environment before it starts the core; the core watches it by a pidfd, which
the kernel makes readable at the moment the owner is gone.
"""

import os
import select
import signal
import threading

OWNER_VARIABLE = 'TWINKLE_VLLM_OWNER_PID'
"""Process id of the owner, for the processes it starts."""


def name_owner() -> None:
    """Make every process that this one starts from now on end with it."""
    os.environ[OWNER_VARIABLE] = str(os.getpid())


def end_with_owner() -> None:
    """Watch the owner from a thread, and end this process with it. Does nothing in the owner itself."""
    owner = int(os.environ.get(OWNER_VARIABLE, '0'))
    if owner in {0, os.getpid()} or not hasattr(os, 'pidfd_open'):
        return
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_wait, args=(descriptor,), name='twinkle-owner-watchdog', daemon=True).start()


def _wait(descriptor: int) -> None:
    select.select([descriptor], [], [])
    # Nothing here is worth saving, and vLLM's own shutdown may wait for the owner that is gone.
    os.kill(os.getpid(), signal.SIGKILL)
