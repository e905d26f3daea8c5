"""Runs the engine of `twinkle.model`, in a thread of this process or in several processes that torchrun starts.

`backend` implements the port, `worker_group` and `torchrun_group` pass its calls to the processes, and `host` runs in
the engine's thread of each process. `exit_group` ends a process that cannot continue. `verbs` converts verbs,
`states` converts states, and `loading` loads the model.
"""

from twinkle_services.model.backends.group.backend import GroupBackend
from twinkle_services.model.backends.group.loading import LoadOptions
from twinkle_services.model.backends.group.worker_group import WorkerGroup

__all__ = ['GroupBackend', 'LoadOptions', 'WorkerGroup']
