"""Errors of modes that this release does not have."""


class NotSupportedYet(NotImplementedError):
    """A documented mode that this release does not implement. The message names an alternative."""
