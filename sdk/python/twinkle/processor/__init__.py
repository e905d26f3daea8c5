"""From features to the packed rows a model runs on. Loads no torch."""

from twinkle.processor.errors import InvalidFeatures
from twinkle.processor.input_processor import PROCESSORS, InputLimits, InputProcessor
from twinkle.processor.packed_batch import STREAM_NAMES, PackedBatch

__all__ = ['PROCESSORS', 'STREAM_NAMES', 'InputLimits', 'InputProcessor', 'InvalidFeatures', 'PackedBatch']
