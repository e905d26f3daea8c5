"""Our examples in the types of the Tinker SDK, which is loaded when the first one is converted."""

from twinkle.server.tinker.datum import input_feature_to_datum

__all__ = ['input_feature_to_datum']
