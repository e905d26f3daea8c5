"""Rollouts: multi-turn chats with tools and environments, staleness limits, and sampling in parallel with training.

This package does not import torch. The engines are in `twinkle.sampler`, the losses in `twinkle.loss`.
"""

from twinkle.rollout.diagnostics import as_sampler_logps, rollout_numbers
from twinkle.rollout.env import Env, EnvFactory, EnvStep, SingleTurn
from twinkle.rollout.episode import EndReason, Rollout
from twinkle.rollout.errors import (
    CallbackFailed,
    ChatCannotGoOn,
    InvalidArguments,
    InvalidTool,
    InvalidTurnRequest,
    PipelineClosed,
    ProgramFailed,
    RolloutError,
    UnknownVersion,
)
from twinkle.rollout.multi_turn import MultiTurnRollout, RolloutOptions
from twinkle.rollout.openenv_envs import OpenEnvEnv, openenv_envs
from twinkle.rollout.pipeline import AsyncPipeline, PipelineBatch
from twinkle.rollout.reasoning_gym import TaskEnv, load_tasks, task_chats, task_envs
from twinkle.rollout.staleness import FreshSamples, drop_stale, staleness_of
from twinkle.rollout.token_track import TokenTrack
from twinkle.rollout.tool import Tool, ToolFailure, ToolResult
from twinkle.rollout.tool_env import ToolEnv
from twinkle.rollout.tool_manager import ToolManager
from twinkle.rollout.verifiers_envs import VerifiersEnvs, load_verifiers

__all__ = [
    'AsyncPipeline',
    'CallbackFailed',
    'ChatCannotGoOn',
    'EndReason',
    'Env',
    'EnvFactory',
    'EnvStep',
    'FreshSamples',
    'InvalidArguments',
    'InvalidTool',
    'InvalidTurnRequest',
    'MultiTurnRollout',
    'OpenEnvEnv',
    'PipelineBatch',
    'PipelineClosed',
    'ProgramFailed',
    'Rollout',
    'RolloutError',
    'RolloutOptions',
    'SingleTurn',
    'TaskEnv',
    'TokenTrack',
    'Tool',
    'ToolEnv',
    'ToolFailure',
    'ToolManager',
    'ToolResult',
    'UnknownVersion',
    'VerifiersEnvs',
    'as_sampler_logps',
    'drop_stale',
    'load_tasks',
    'load_verifiers',
    'openenv_envs',
    'rollout_numbers',
    'staleness_of',
    'task_chats',
    'task_envs',
]
