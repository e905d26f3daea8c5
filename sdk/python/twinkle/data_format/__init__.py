"""Values that components exchange: messages, features, sampling requests, samples and training results.

This package contains plain data only. It imports neither torch nor any service and does no I/O, so it can be imported
anywhere. Tokenization is in `twinkle.template`, and computation in `twinkle.model` and `twinkle.sampler`.
"""

from twinkle.data_format.base_model import BASE_MODEL_ALIASES, base_model_id, listed_base_model
from twinkle.data_format.boxed import boxed_answers
from twinkle.data_format.input_feature import IGNORE_INDEX, InputFeature
from twinkle.data_format.lora import LoraConfig
from twinkle.data_format.media import AudioSpec, Grid, MediaKind, MediaSpec, VisionSpec, media_spec
from twinkle.data_format.model_output import LossOutput, ModelOutput
from twinkle.data_format.prompt_probe import InvalidProbe, ProbeResult, PromptProbe
from twinkle.data_format.sampling import (
    SampledSequence,
    SampleResponse,
    SampleResults,
    SamplingParams,
    StopReason,
    StructuredOutput,
    VersionSpan,
    extended_experts,
)
from twinkle.data_format.streams import EXTRA_STREAMS, STREAMS, StreamSpec
from twinkle.data_format.tensor import DTYPE_NAMES, TensorData, number_array
from twinkle.data_format.training_result import ForwardResult, LayerHealth, StepResult
from twinkle.data_format.trajectory import (
    FunctionCall,
    FunctionSpec,
    Message,
    Tool,
    ToolCall,
    Trajectory,
    UserDatum,
    pack_user_data,
    pack_value,
    user_data_get,
    user_data_values,
)

__all__ = [
    'BASE_MODEL_ALIASES',
    'DTYPE_NAMES',
    'EXTRA_STREAMS',
    'IGNORE_INDEX',
    'STREAMS',
    'AudioSpec',
    'ForwardResult',
    'FunctionCall',
    'FunctionSpec',
    'Grid',
    'InputFeature',
    'InvalidProbe',
    'LayerHealth',
    'LoraConfig',
    'LossOutput',
    'MediaKind',
    'MediaSpec',
    'Message',
    'ModelOutput',
    'ProbeResult',
    'PromptProbe',
    'SampleResponse',
    'SampleResults',
    'SampledSequence',
    'SamplingParams',
    'StepResult',
    'StopReason',
    'StreamSpec',
    'StructuredOutput',
    'TensorData',
    'Tool',
    'ToolCall',
    'Trajectory',
    'UserDatum',
    'VersionSpan',
    'VisionSpec',
    'base_model_id',
    'boxed_answers',
    'extended_experts',
    'listed_base_model',
    'media_spec',
    'number_array',
    'pack_user_data',
    'pack_value',
    'user_data_get',
    'user_data_values',
]
