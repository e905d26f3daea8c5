"""What training minimises: one loss per file, over the labels that count."""

from twinkle.loss.base import Loss, LossBatch, MissingStream
from twinkle.loss.cross_entropy import CrossEntropyLoss
from twinkle.loss.registry import LOSSES, build_loss

__all__ = ['LOSSES', 'CrossEntropyLoss', 'Loss', 'LossBatch', 'MissingStream', 'build_loss']
