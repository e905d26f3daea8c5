"""The engine of `twinkle.model` in this process: one model, one thread.

`backend` is the port, `host` what happens in the thread, `verbs` one function a verb, `states` the state of adapters
in and out, `loading` how it begins.
"""

from services.model.backends.local.backend import LocalBackend
from services.model.backends.local.loading import LoadOptions

__all__ = ['LoadOptions', 'LocalBackend']
