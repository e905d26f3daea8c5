"""Conversion of training examples to types of the Tinker SDK. The SDK is imported on first use."""

from twinkle.server.tinker.datum import input_feature_to_datum

__all__ = ['input_feature_to_datum']
