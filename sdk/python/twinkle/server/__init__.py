"""Helpers for programs that use the Tinker API.

The names of the packages are stable, because existing programs import them. The services are in the `services`
package.
"""

from twinkle.server.tinker import input_feature_to_datum

__all__ = ['input_feature_to_datum']
