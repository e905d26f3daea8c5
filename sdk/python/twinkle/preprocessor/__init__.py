"""Preprocessors and filters for `Dataset.map` and `Dataset.filter`. This package does not import torch."""

from twinkle.preprocessor.alpaca import AlpacaProcessor
from twinkle.preprocessor.base import Columns, DataFilter, Filter, Preprocessor, Row, RowPreprocessor, report_of
from twinkle.preprocessor.clevr import CLEVRProcessor
from twinkle.preprocessor.competition_math import CompetitionMathGRPOProcessor, CompetitionMathProcessor
from twinkle.preprocessor.countdown import CountdownProcessor
from twinkle.preprocessor.emoji_dpo import EmojiDPOProcessor
from twinkle.preprocessor.errors import InvalidArguments, InvalidRow, PreprocessorError, UnknownPreprocessor
from twinkle.preprocessor.gsm8k import GSM8KProcessor
from twinkle.preprocessor.length_filter import TextLengthFilter
from twinkle.preprocessor.olympiad_bench import OlympiadBenchProcessor
from twinkle.preprocessor.quality import (
    DeadLoopFilter,
    DedupFilter,
    Drop,
    DroppedRow,
    HardFilter,
    MessageNormalizer,
    MessageSanityFilter,
    QualityFilter,
    QualityPreprocessor,
    RefuseFilter,
)
from twinkle.preprocessor.registry import (
    FilterFunction,
    MapFunction,
    build_filter,
    build_preprocessor,
    filter_names,
    preprocessor_names,
    refuse_paths,
)
from twinkle.preprocessor.row_formats import ROW_FORMATS, FormatProcessor, FormatReader, RowFormat, check_format
from twinkle.preprocessor.self_cognition import SelfCognitionProcessor

__all__ = [
    'ROW_FORMATS',
    'AlpacaProcessor',
    'CLEVRProcessor',
    'Columns',
    'CompetitionMathGRPOProcessor',
    'CompetitionMathProcessor',
    'CountdownProcessor',
    'DataFilter',
    'DeadLoopFilter',
    'DedupFilter',
    'Drop',
    'DroppedRow',
    'EmojiDPOProcessor',
    'Filter',
    'FilterFunction',
    'FormatProcessor',
    'FormatReader',
    'GSM8KProcessor',
    'HardFilter',
    'InvalidArguments',
    'InvalidRow',
    'MapFunction',
    'MessageNormalizer',
    'MessageSanityFilter',
    'OlympiadBenchProcessor',
    'Preprocessor',
    'PreprocessorError',
    'QualityFilter',
    'QualityPreprocessor',
    'RefuseFilter',
    'Row',
    'RowFormat',
    'RowPreprocessor',
    'SelfCognitionProcessor',
    'TextLengthFilter',
    'UnknownPreprocessor',
    'build_filter',
    'build_preprocessor',
    'check_format',
    'filter_names',
    'preprocessor_names',
    'refuse_paths',
    'report_of',
]
