"""Quality filters of chats, which report the reason for each removed row, and a pipeline that runs them in order."""

from twinkle.preprocessor.quality.base import UNREADABLE, Drop, DroppedRow, QualityFilter
from twinkle.preprocessor.quality.dead_loop import DeadLoopFilter
from twinkle.preprocessor.quality.dedup import DedupFilter
from twinkle.preprocessor.quality.hard_filter import HardFilter
from twinkle.preprocessor.quality.message_normalizer import MessageNormalizer
from twinkle.preprocessor.quality.message_sanity import MessageSanityFilter
from twinkle.preprocessor.quality.pipeline import QUALITY_FILTERS, STAGES, QualityPreprocessor
from twinkle.preprocessor.quality.refuse import RefuseFilter

__all__ = [
    'QUALITY_FILTERS',
    'STAGES',
    'UNREADABLE',
    'DeadLoopFilter',
    'DedupFilter',
    'Drop',
    'DroppedRow',
    'HardFilter',
    'MessageNormalizer',
    'MessageSanityFilter',
    'QualityFilter',
    'QualityPreprocessor',
    'RefuseFilter',
]
