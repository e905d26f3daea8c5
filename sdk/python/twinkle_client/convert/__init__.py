"""Pure functions that convert between the library's values and the messages of the contract.

Values that cannot be sent raise a ValueError or a TypeError, which names the field. The server performs further checks.
"""

from twinkle_client.convert.config import (
    component_config,
    full_parameter_config,
    lora_config,
    loss_config,
    optimizer_config,
    scheduler_config,
)
from twinkle_client.convert.features import feature_from_proto, features_to_proto
from twinkle_client.convert.sampling import adapter_ref, prompt_to_proto, sampling_params
from twinkle_client.convert.tensors import tensor_from_proto, tensor_to_proto, vector
from twinkle_client.convert.trajectories import trajectory_from_proto, trajectory_to_proto

__all__ = [
    'adapter_ref',
    'component_config',
    'feature_from_proto',
    'features_to_proto',
    'full_parameter_config',
    'lora_config',
    'loss_config',
    'optimizer_config',
    'prompt_to_proto',
    'sampling_params',
    'scheduler_config',
    'tensor_from_proto',
    'tensor_to_proto',
    'trajectory_from_proto',
    'trajectory_to_proto',
    'vector',
]
