"""Runs the engine of `twinkle.model` in a separate thread of this process.

`backend` implements the port, `host` runs in the engine's thread, `verbs` converts each verb, `states` converts states,
and `loading` loads the model.
"""

from services.model.backends.local.backend import LocalBackend
from services.model.backends.local.loading import LoadOptions

__all__ = ['LoadOptions', 'LocalBackend']
