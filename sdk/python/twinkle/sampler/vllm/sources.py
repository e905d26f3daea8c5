"""Weights from PEFT folders, LoRA configurations and model folders."""

from os import PathLike
from pathlib import Path

from safetensors import safe_open

from twinkle.checkpoint_engine import is_named, read_peft_folder
from twinkle.data_format import LoraConfig, TensorData
from twinkle.data_format.lora import ALL_ATTENTION, ALL_EXPERTS, ALL_LINEAR, ALL_MLP, OUTPUT_HEAD, is_expert_weight
from twinkle.nn import tensor_data_of
from twinkle.nn.targets import is_attention_layer
from twinkle.sampler.vllm.handover import AdapterSource
from twinkle.sampler.vllm.model_facts import checkpoint_shapes

_NO_LAYERS = ('embed_tokens', 'lm_head')
"""Matrices that are not linear layers of the model body."""


def adapter_source(folder: str, given: LoraConfig | str | PathLike[str]) -> AdapterSource:
    """Return the weights of a PEFT folder, or newly initialized weights for a configuration.

    Args:
        folder: folder of the base model.
        given: PEFT folder, or configuration (`LoraConfig` or PEFT's).

    Raises:
        ValueError: the configuration is invalid, matches no layer of the model, or includes the output head or experts.
        TypeError: the configuration has an unknown key or no rank.
        InvalidPeftFolder: the folder does not contain a supported adapter.
    """
    if isinstance(given, str | PathLike):
        tensors, config = read_peft_folder(Path(given))
        return AdapterSource(config=config, tensors=tensors)
    config = LoraConfig.of(given)
    if OUTPUT_HEAD in _targets_of(config):
        raise ValueError(f'target_modules includes {OUTPUT_HEAD!r}, which vLLM does not support; leave it out')
    experts = [name for name in _targets_of(config) if name == ALL_EXPERTS or is_expert_weight(name)]
    if experts:
        raise ValueError(f'target_modules includes {experts[0]!r}, which only the torch engine supports; leave it out')
    return AdapterSource(config=config, tensors=_zero_factors(folder, config))


def folder_tensors(folder: str) -> dict[str, TensorData]:
    """Return all tensors of a model folder's safetensors files, by name."""
    tensors: dict[str, TensorData] = {}
    for path in sorted(Path(folder).glob('*.safetensors')):
        with safe_open(path, framework='pt') as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensors[name] = tensor_data_of(file.get_tensor(name))
    return tensors


def tensor_names(folder: str) -> list[str]:
    """Return the names of all tensors in a model folder."""
    return sorted(checkpoint_shapes(folder))


def _zero_factors(folder: str, config: LoraConfig) -> dict[str, TensorData]:
    """Return factors of zeros. The initial value of A does not matter, because B is zero."""
    tensors: dict[str, TensorData] = {}
    for name, shape in checkpoint_shapes(folder).items():
        path = name.removesuffix('.weight')
        if len(shape) != 2 or path.rpartition('.')[2] in _NO_LAYERS or not _is_target(path, config):
            continue
        rank = next((rank for key, rank in config.rank_pattern.items() if is_named(path, key)), config.r)
        for part, size in (('A', (rank, shape[1])), ('B', (shape[0], rank))):
            zeros = bytes(4 * size[0] * size[1])
            tensors[f'base_model.model.{path}.lora_{part}.weight'] = TensorData('float32', size, zeros)
    if not tensors:
        raise ValueError(f'target_modules {config.target_modules!r} matches no layer of this model')
    return tensors


def _is_target(path: str, config: LoraConfig) -> bool:
    group = ALL_ATTENTION if is_attention_layer(path) else ALL_MLP
    return any(name in (ALL_LINEAR, group) or is_named(path, name) for name in _targets_of(config))


def _targets_of(config: LoraConfig) -> tuple[str, ...]:
    targets = config.target_modules
    return (targets,) if isinstance(targets, str) else tuple(targets)
