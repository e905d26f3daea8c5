"""What programs that speak the Tinker API import to bring our examples to it; the services themselves are elsewhere.

The packages' names are those that users type.
"""

from twinkle.server.tinker import input_feature_to_datum

__all__ = ['input_feature_to_datum']
