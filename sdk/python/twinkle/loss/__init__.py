"""What training minimises: one loss per file, over the labels that count."""

from twinkle.loss.base import OUTPUT_NAMES, Loss, LossBatch
from twinkle.loss.cross_entropy import CrossEntropyLoss
from twinkle.loss.errors import InvalidLossInput, MissingOutput, MissingStream
from twinkle.loss.registry import LOSSES, build_loss

__all__ = [
    'LOSSES',
    'OUTPUT_NAMES',
    'CrossEntropyLoss',
    'InvalidLossInput',
    'Loss',
    'LossBatch',
    'MissingOutput',
    'MissingStream',
    'build_loss',
]
