"""Weights of one LoRA adapter on one device."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from twinkle.checkpoint_engine.lora_layers import PREFIX, tensor_paths_of
from twinkle.data_format import LoraConfig
from twinkle.nn.dropout import RowDropout
from twinkle.nn.expert_factors import ExpertFactors
from twinkle.nn.lora_factors import LoraFactors
from twinkle.nn.targets import Layers, expert_counts_of, rank_of, scaling_of, select_layers


class LoraWeights:
    """Low-rank factors by module path, and the random state of their dropout.

    Args:
        config: LoRA configuration of the adapter.
        factors: factors by module path of the base model, in the model's order.
        seed: seed of dropout.
        tensor_paths: paths in the names of tensors that differ from the module paths.
    """

    def __init__(
        self,
        config: LoraConfig,
        factors: Mapping[str, LoraFactors | ExpertFactors],
        *,
        seed: int,
        tensor_paths: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.factors = dict(factors)
        self._tensor_paths = tensor_paths
        # The generator is always on the CPU, so a run can move between devices.
        self.dropout_generator = torch.Generator().manual_seed(seed)

    @classmethod
    def create(
        cls, layers: Layers, config: LoraConfig, *, seed: int, device: str = 'cpu', is_trainable: bool = False
    ) -> 'LoraWeights':
        """Initialize an adapter: A is uniform in `±1 / sqrt(in)` (He et al. 2015, slope sqrt 5), and B is zero.

        Args:
            layers: linear layers of the base model.
            config: ranks, targets and scaling.
            seed: seed of A and of dropout; the same seed gives the same weights on every device.
            device: torch device of the weights.
            is_trainable: whether the weights collect gradients.

        Raises:
            UnknownTargetModules: the configuration names layers that the model does not have.
            ExpertDropout: the configuration has dropout and targets experts.
        """
        generator = torch.Generator().manual_seed(seed)
        factors: dict[str, LoraFactors | ExpertFactors] = {}
        expert_counts = expert_counts_of(layers)
        for path in select_layers(layers, config):
            inputs, outputs = layers[path]
            count = rank_of(path, config) * expert_counts.get(path, 1)
            a = torch.empty(count, inputs)
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            a, b, scaling = a.to(device), torch.zeros(outputs, count).to(device), scaling_of(path, config)
            is_stacked = path in expert_counts
            factors[path] = (
                ExpertFactors(a, b, scaling, expert_counts[path]) if is_stacked else LoraFactors(a, b, scaling)
            )
        tensor_paths = tensor_paths_of(list(factors)) if expert_counts else {}
        return cls(config, factors, seed=seed, tensor_paths=tensor_paths).requires_grad_(is_trainable=is_trainable)

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
            UnknownTargetModules, ExpertDropout: see `create`.
            ValueError: a tensor is missing or unexpected, or its shape does not match the configuration.
        """
        weights = cls.create(layers, config, seed=config.seed or 0, device=device)
        weights.load_peft_state(state)
        return weights.requires_grad_(is_trainable=is_trainable)

    def peft_state(self) -> dict[str, Tensor]:
        """Return the weights under peft's names, without copying."""
        state: dict[str, Tensor] = {}
        for path, factors in self.factors.items():
            name = f'{PREFIX}{self._tensor_paths.get(path, path)}'
            state[f'{name}.lora_A.weight'] = factors.a.detach()
            state[f'{name}.lora_B.weight'] = factors.b.detach()
        return state

    def load_peft_state(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite all weights in place.

        Raises:
            ValueError: a tensor is missing, unexpected, or has a different shape; no weight was changed.
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
        """Return the factors of a linear layer, or None if the layer is not a target."""
        factors = self.factors.get(path)
        return factors if isinstance(factors, LoraFactors) else None

    def expert_update_of(self, path: str) -> ExpertFactors | None:
        """Return the factors of the stacked expert weights, or None if they are not a target."""
        factors = self.factors.get(path)
        return factors if isinstance(factors, ExpertFactors) else None

    def sample_dropout(self) -> RowDropout | None:
        """Sample the dropout of one training pass from the adapter's generator; return None without dropout."""
        probability = self.config.lora_dropout
        return RowDropout.sample(probability, self.dropout_generator) if probability else None

    @property
    def parameter_count(self) -> int:
        """Number of scalars."""
        return sum(tensor.numel() for tensor in self.parameters())
