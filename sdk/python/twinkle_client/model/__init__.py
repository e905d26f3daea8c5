"""Adapters trained by the model service."""

from twinkle_client.model.forward import ForwardOutput
from twinkle_client.model.multi_lora import MultiLoraTransformersModel
from twinkle_client.model.training import StepOutput

__all__ = ['ForwardOutput', 'MultiLoraTransformersModel', 'StepOutput']
