"""Alternative import path, used by older programs; see `twinkle.server.tinker.datum`."""

from twinkle.server.tinker.datum import input_feature_to_datum

__all__ = ['input_feature_to_datum']
