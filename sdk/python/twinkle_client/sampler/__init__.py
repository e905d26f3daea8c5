"""The remote sampler and its results."""

from twinkle.data_format import SampledSequence, SampleResults
from twinkle_client.sampler.results import SampleDelta
from twinkle_client.sampler.sampler import Sampler, vLLMSampler

__all__ = ['SampleDelta', 'SampleResults', 'SampledSequence', 'Sampler', 'vLLMSampler']
