"""Errors of running a program on several devices."""


class NotSupportedYet(NotImplementedError):
    """A documented mode that this release does not implement. The message names an alternative."""


class WorkersLost(RuntimeError):
    """A worker process ended, and its group's components are lost. Save checkpoints, and start the program again."""
