"""The torch sampling engine: synchronous continuous batching over `twinkle.nn.PackedCausalLM`."""

from twinkle.sampler.engine.config import EngineConfig
from twinkle.sampler.engine.engine import SamplerEngine
from twinkle.sampler.engine.request import (
    EngineAdapter,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    PromptEvent,
    PromptMedia,
    SequenceSoFar,
    TokenEvent,
    TopTokens,
)

__all__ = [
    'EngineAdapter',
    'EngineConfig',
    'EngineEvent',
    'EngineLoad',
    'EngineRequest',
    'PromptEvent',
    'PromptMedia',
    'SamplerEngine',
    'SequenceSoFar',
    'TokenEvent',
    'TopTokens',
]
