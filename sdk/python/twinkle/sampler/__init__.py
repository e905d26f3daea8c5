"""Samplers for user programs: `TorchSampler`, with the reference engine in `engine/`, and `vLLMSampler`."""

from twinkle.sampler.base import Sampler, SamplerInput
from twinkle.sampler.errors import (
    ContextExceeded,
    DuplicateRequest,
    InvalidPrompt,
    InvalidSamplingParams,
    SamplerBusy,
    SamplerError,
    UnknownAdapter,
    UnknownRequest,
)
from twinkle.sampler.torch_sampler import TorchSampler
from twinkle.sampler.vllm_sampler import vLLMSampler

__all__ = [
    'ContextExceeded',
    'DuplicateRequest',
    'InvalidPrompt',
    'InvalidSamplingParams',
    'Sampler',
    'SamplerBusy',
    'SamplerError',
    'SamplerInput',
    'TorchSampler',
    'UnknownAdapter',
    'UnknownRequest',
    'vLLMSampler',
]
