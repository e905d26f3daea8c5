"""From raw rows to chats: what `Dataset.map` and `Dataset.filter` take. Loads no torch."""

from twinkle.preprocessor.alpaca import AlpacaProcessor
from twinkle.preprocessor.base import Columns, DataFilter, Preprocessor, Row, RowPreprocessor
from twinkle.preprocessor.competition_math import CompetitionMathProcessor
from twinkle.preprocessor.countdown import CountdownProcessor
from twinkle.preprocessor.errors import InvalidArguments, InvalidRow, PreprocessorError, UnknownPreprocessor
from twinkle.preprocessor.gsm8k import GSM8KProcessor
from twinkle.preprocessor.length_filter import TextLengthFilter
from twinkle.preprocessor.registry import (
    FilterFunction,
    MapFunction,
    build_filter,
    build_preprocessor,
    filter_names,
    preprocessor_names,
)
from twinkle.preprocessor.self_cognition import SelfCognitionProcessor

__all__ = [
    'AlpacaProcessor',
    'Columns',
    'CompetitionMathProcessor',
    'CountdownProcessor',
    'DataFilter',
    'FilterFunction',
    'GSM8KProcessor',
    'InvalidArguments',
    'InvalidRow',
    'MapFunction',
    'Preprocessor',
    'PreprocessorError',
    'Row',
    'RowPreprocessor',
    'SelfCognitionProcessor',
    'TextLengthFilter',
    'UnknownPreprocessor',
    'build_filter',
    'build_preprocessor',
    'filter_names',
    'preprocessor_names',
]
