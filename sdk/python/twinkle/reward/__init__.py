"""Rewards, which score completions: one module per task, and a sandbox for model-written programs.

This package does not import torch.
"""

from twinkle.reward.arithmetic import evaluate
from twinkle.reward.base import AnswerReward, Reward, TextReward
from twinkle.reward.code_execution import CodeExecutionReward
from twinkle.reward.countdown import CountDownAccuracy
from twinkle.reward.errors import (
    InvalidRewardInput,
    InvalidRewardOutput,
    ProgramNotStarted,
    SandboxUnavailable,
)
from twinkle.reward.f1 import F1Reward
from twinkle.reward.format_reward import FormatReward
from twinkle.reward.gsm8k import GSM8KAccuracyReward, GSM8KFormatReward
from twinkle.reward.length import LengthReward
from twinkle.reward.math_judge import MathJudge
from twinkle.reward.math_reward import MathReward
from twinkle.reward.multi_modal import MultiModalAccuracyReward
from twinkle.reward.olympiad_bench import (
    OlympiadBenchAccuracyReward,
    OlympiadBenchFormatReward,
    OlympiadBenchQualityReward,
)
from twinkle.reward.registry import REWARDS, build_reward
from twinkle.reward.sandbox import ProgramResult, SandboxLimits, run_program

__all__ = [
    'REWARDS',
    'AnswerReward',
    'CodeExecutionReward',
    'CountDownAccuracy',
    'F1Reward',
    'FormatReward',
    'GSM8KAccuracyReward',
    'GSM8KFormatReward',
    'InvalidRewardInput',
    'InvalidRewardOutput',
    'LengthReward',
    'MathJudge',
    'MathReward',
    'MultiModalAccuracyReward',
    'OlympiadBenchAccuracyReward',
    'OlympiadBenchFormatReward',
    'OlympiadBenchQualityReward',
    'ProgramNotStarted',
    'ProgramResult',
    'Reward',
    'SandboxLimits',
    'SandboxUnavailable',
    'TextReward',
    'build_reward',
    'evaluate',
    'run_program',
]
