"""Alternative import path, used by newer programs; see `twinkle.server.tinker.datum`."""

from twinkle.server.tinker import input_feature_to_datum

__all__ = ['input_feature_to_datum']
