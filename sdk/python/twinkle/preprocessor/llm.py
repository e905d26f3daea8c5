"""Preprocessors of text datasets, re-exported under the module name that the quick start programs import."""

from twinkle.preprocessor.alpaca import AlpacaProcessor
from twinkle.preprocessor.competition_math import CompetitionMathGRPOProcessor, CompetitionMathProcessor
from twinkle.preprocessor.countdown import CountdownProcessor
from twinkle.preprocessor.emoji_dpo import EmojiDPOProcessor
from twinkle.preprocessor.gsm8k import GSM8KProcessor
from twinkle.preprocessor.self_cognition import SelfCognitionProcessor

__all__ = [
    'AlpacaProcessor',
    'CompetitionMathGRPOProcessor',
    'CompetitionMathProcessor',
    'CountdownProcessor',
    'EmojiDPOProcessor',
    'GSM8KProcessor',
    'SelfCognitionProcessor',
]
