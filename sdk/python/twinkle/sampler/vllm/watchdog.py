"""Stops vLLM's processes when their owner process exits.

If the owner of vLLM's engine core is killed by SIGKILL, the core waits indefinitely and keeps the model's memory. The
owner therefore writes its process id to the environment before it starts the core. The core watches a pidfd of the
owner, which becomes readable when the owner exits.
"""

import os
import select
import signal
import threading

OWNER_VARIABLE = 'TWINKLE_VLLM_OWNER_PID'
"""Environment variable with the process id of the owner, for its child processes."""


def record_owner() -> None:
    """Record this process as the owner, for calls of `exit_with_owner` in its child processes."""
    os.environ[OWNER_VARIABLE] = str(os.getpid())


def exit_with_owner() -> None:
    """Start a thread that kills this process when the owner exits.

    Has no effect in the owner, without a recorded owner, and on systems without pidfd. If the owner has already exited,
    this process is killed immediately.
    """
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
    # There is no state to save, and vLLM's shutdown could wait for the owner, which has exited.
    os.kill(os.getpid(), signal.SIGKILL)
