"""Trainer classes for training loops, and their errors. Their engine is `twinkle.model.engine`."""

from twinkle.model.base import TwinkleModel
from twinkle.model.errors import (
    AdapterExists,
    AdapterNotReady,
    BatchTooLarge,
    InvalidArgument,
    LossFailed,
    LossNotFinite,
    MetricFailed,
    ModelLeased,
    SnapshotMismatch,
    TrainerError,
    UnknownAdapter,
)
from twinkle.model.megatron import MegatronModel, MultiLoraMegatronModel
from twinkle.model.multi_lora import MultiLoraTransformersModel
from twinkle.model.transformers_model import TransformersModel
from twinkle.model.value_model import TransformersValueModel

__all__ = [
    'AdapterExists',
    'AdapterNotReady',
    'BatchTooLarge',
    'InvalidArgument',
    'LossFailed',
    'LossNotFinite',
    'MegatronModel',
    'MetricFailed',
    'ModelLeased',
    'MultiLoraMegatronModel',
    'MultiLoraTransformersModel',
    'SnapshotMismatch',
    'TrainerError',
    'TransformersModel',
    'TransformersValueModel',
    'TwinkleModel',
    'UnknownAdapter',
]
