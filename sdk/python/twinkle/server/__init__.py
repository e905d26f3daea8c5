"""Helpers for programs that use the Tinker API. Existing programs import these package names, so they do not change.

The services themselves are in the `services` package.
"""

from twinkle.server.tinker import input_feature_to_datum

__all__ = ['input_feature_to_datum']
