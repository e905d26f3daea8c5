"""Helpers for programs that use the Tinker API. The package names are a compatibility promise to existing programs.

The services themselves are in the `services` package.
"""

from twinkle.server.tinker import input_feature_to_datum

__all__ = ['input_feature_to_datum']
