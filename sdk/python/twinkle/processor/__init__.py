"""Conversion of features to the packed rows that a model runs on. The package does not import torch."""

from twinkle.processor.errors import InvalidFeatures
from twinkle.processor.input_processor import PROCESSORS, InputLimits, InputProcessor
from twinkle.processor.media_fields import MEDIA_NAMES, MediaFields
from twinkle.processor.needs import STREAM_NAMES, FeatureNeeds, LossNeeds, ignored_streams
from twinkle.processor.packed_batch import PackedBatch, PackedMedia, join_positions
from twinkle.processor.prefix_tree import PrefixTree, PrefixTreeBuilder

__all__ = [
    'MEDIA_NAMES',
    'PROCESSORS',
    'STREAM_NAMES',
    'FeatureNeeds',
    'InputLimits',
    'InputProcessor',
    'InvalidFeatures',
    'LossNeeds',
    'MediaFields',
    'PackedBatch',
    'PackedMedia',
    'PrefixTree',
    'PrefixTreeBuilder',
    'ignored_streams',
    'join_positions',
]
