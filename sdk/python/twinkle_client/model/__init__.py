"""Adapters trained by the model service."""

from twinkle_client.model.forward import ForwardOutput
from twinkle_client.model.multi_lora import MultiLoraTransformersModel
from twinkle_client.model.planning import EstimateOutput
from twinkle_client.model.receipt import Receipt
from twinkle_client.model.training import LayerHealth, StepOutput

__all__ = ['EstimateOutput', 'ForwardOutput', 'LayerHealth', 'MultiLoraTransformersModel', 'Receipt', 'StepOutput']
