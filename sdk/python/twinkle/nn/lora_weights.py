"""Weights of one LoRA adapter on one device."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from twinkle.data_format import LoraConfig
from twinkle.nn.dropout import RowDropout
from twinkle.nn.lora_factors import LoraFactors
from twinkle.nn.targets import Layers, rank_of, scaling_of, select_layers

_PEFT_PREFIX = 'base_model.model.'


class LoraWeights:
    """Low-rank factors by module path, and the random state of their dropout.

    Args:
        config: LoRA configuration of the adapter.
        factors: factors by module path of the base model, in the model's order.
        seed: seed of dropout.
    """

    def __init__(self, config: LoraConfig, factors: Mapping[str, LoraFactors], *, seed: int) -> None:
        self.config = config
        self.factors = dict(factors)
        # The generator is on the CPU on every device, so a run can move between devices.
        self.dropout_generator = torch.Generator().manual_seed(seed)

    @classmethod
    def create(
        cls, layers: Layers, config: LoraConfig, *, seed: int, device: str = 'cpu', is_trainable: bool = False
    ) -> 'LoraWeights':
        """Initialize an adapter: A uniform in `±1 / sqrt(in)` (He et al. 2015 with a slope of sqrt 5), B zero.

        Args:
            layers: linear layers of the base model.
            config: ranks, targets and scaling.
            seed: seed of A and of dropout; the same seed gives the same weights on every device.
            device: torch device of the weights.
            is_trainable: whether the weights collect gradients.

        Raises:
            UnknownTargetModules: the configuration names layers that the model does not have.
        """
        generator = torch.Generator().manual_seed(seed)
        factors: dict[str, LoraFactors] = {}
        for path in select_layers(layers, config):
            inputs, outputs = layers[path]
            rank = rank_of(path, config)
            a = torch.empty(rank, inputs)
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            b = torch.zeros(outputs, rank)
            factors[path] = LoraFactors(a.to(device), b.to(device), scaling_of(path, config))
        return cls(config, factors, seed=seed).requires_grad_(is_trainable=is_trainable)

    @classmethod
    def from_peft_state(
        cls,
        layers: Layers,
        config: LoraConfig,
        state: Mapping[str, Tensor],
        *,
        device: str = 'cpu',
        is_trainable: bool = False,
    ) -> 'LoraWeights':
        """Build an adapter from tensors under peft's names; the tensors are copied.

        Raises:
            UnknownTargetModules: the configuration names layers that the model does not have.
            ValueError: a tensor is missing, unexpected, or has another shape than the configuration requires.
        """
        weights = cls.create(layers, config, seed=config.seed or 0, device=device)
        weights.load_peft_state(state)
        return weights.requires_grad_(is_trainable=is_trainable)

    def peft_state(self) -> dict[str, Tensor]:
        """Return the weights under the names that peft saves them by, without copying."""
        state: dict[str, Tensor] = {}
        for path, factors in self.factors.items():
            state[f'{_PEFT_PREFIX}{path}.lora_A.weight'] = factors.a.detach()
            state[f'{_PEFT_PREFIX}{path}.lora_B.weight'] = factors.b.detach()
        return state

    def load_peft_state(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite all weights in place.

        Raises:
            ValueError: a tensor is missing, unexpected, or has another shape; no weight was changed.
        """
        own = self.peft_state()
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unexpected:
            raise ValueError(f'tensors do not match the adapter: missing {missing[:3]}, unexpected {unexpected[:3]}')
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                raise ValueError(f'{name} must have shape {tuple(tensor.shape)}, got {tuple(state[name].shape)}')
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def parameters(self) -> list[Tensor]:
        """Return A and B of every layer, in a fixed order."""
        return [tensor for factors in self.factors.values() for tensor in (factors.a, factors.b)]

    @property
    def layer_paths(self) -> list[str]:
        """Module path of the layer of each of `parameters`."""
        return [path for path, factors in self.factors.items() for _ in factors.parameters()]

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the trainable tensors under peft's names, in the order of `parameters`."""
        return dict(zip(self.peft_state(), self.parameters(), strict=True))

    def requires_grad_(self, *, is_trainable: bool) -> 'LoraWeights':
        """Set whether the weights collect gradients; return self."""
        for tensor in self.parameters():
            tensor.requires_grad_(is_trainable)
        return self

    def update_of(self, path: str) -> LoraFactors | None:
        """Return the factors of a layer, or None if the layer is not a target."""
        return self.factors.get(path)

    def sample_dropout(self) -> RowDropout | None:
        """Sample the dropout of one training pass from the adapter's generator, or return None if it has none."""
        probability = self.config.lora_dropout
        return RowDropout.sample(probability, self.dropout_generator) if probability else None

    @property
    def parameter_count(self) -> int:
        """Number of scalars."""
        return sum(tensor.numel() for tensor in self.parameters())
