"""Estimators of advantages, which measure how much better a completion was than expected. They need no torch."""

from twinkle.advantage.base import Advantage, FloatVector, GroupAdvantage, Scale
from twinkle.advantage.errors import InvalidAdvantageInput
from twinkle.advantage.gae import GAEAdvantage
from twinkle.advantage.grpo import GRPOAdvantage
from twinkle.advantage.registry import ADVANTAGES, build_advantage
from twinkle.advantage.rloo import RLOOAdvantage

__all__ = [
    'ADVANTAGES',
    'Advantage',
    'FloatVector',
    'GAEAdvantage',
    'GRPOAdvantage',
    'GroupAdvantage',
    'InvalidAdvantageInput',
    'RLOOAdvantage',
    'Scale',
    'build_advantage',
]
