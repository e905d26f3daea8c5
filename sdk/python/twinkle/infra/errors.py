"""Errors of running a program on several devices."""


class NotSupportedYet(NotImplementedError):
    """A mode, option or call that this release does not support. The message names an alternative."""


class WorkersLost(RuntimeError):
    """A worker process ended, and the components of its group are lost. Restart the program from a checkpoint."""
