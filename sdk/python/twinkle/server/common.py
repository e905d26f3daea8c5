"""The name that newer programs import from; see `twinkle.server.tinker.datum`."""

from twinkle.server.tinker import input_feature_to_datum

__all__ = ['input_feature_to_datum']
