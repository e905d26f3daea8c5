"""Checks that an adapter fits a base model. The checks compare shapes and do not read weights."""

from collections.abc import Container

from twinkle.checkpoint_engine.errors import AdapterMismatch
from twinkle.checkpoint_engine.float_bytes import FLOAT_DTYPES
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle.checkpoint_engine.lora_layers import AdapterLayer, Shapes, adapter_layers
from twinkle.data_format import LoraConfig

SEPARATE_WEIGHTS = {'gate_up_proj': ('gate_proj', 'up_proj'), 'down_proj': ('down_proj',)}
"""Names of an expert's matrices in folders that store experts separately, by the name of the stacked weights."""
_HEAD, _EMBEDDINGS = 'lm_head.weight', 'model.embed_tokens.weight'


def layer_shapes(base: ModelFolder) -> Shapes:
    """Return the shape of each floating-point matrix and stack of matrices of the model, by name.

    Linear layers have the shape `(out, in)`, and stacked expert weights `(experts, out, in)`. An output head that
    is tied to the embeddings is included with the shape of the embeddings.
    """
    shapes = {
        name: entry.shape
        for name, entry in base.entries.items()
        if entry.dtype in FLOAT_DTYPES and len(entry.shape) in (2, 3)
    }
    if _HEAD not in shapes and _EMBEDDINGS in shapes and base.config.get('tie_word_embeddings', True):
        shapes[_HEAD] = shapes[_EMBEDDINGS]
    return shapes


def check_fit(base: Shapes | None, adapter: Shapes, config: LoraConfig, *, max_rank: int) -> None:
    """Check an adapter against a base model.

    Args:
        base: result of `layer_shapes`. None: the shapes are unknown, so only the adapter itself is checked.
        adapter: shape of each tensor of the adapter, by canonical name.
        config: configuration of the adapter.
        max_rank: highest allowed rank.

    Raises:
        AdapterMismatch: the adapter is inconsistent, a rank is too high, or the model lacks a layer, has a different
            shape for it, or has more experts.
    """
    try:
        layers = adapter_layers(adapter, config)
    except ValueError as error:
        raise AdapterMismatch(str(error)) from None
    for layer in layers:
        if layer.rank > max_rank:
            raise AdapterMismatch(
                f'layer {layer.path} has rank {layer.rank}, but this server supports ranks up to {max_rank}'
            )
        if base is not None:
            for name, shape in base_weights_of(layer, base).items():
                _check_weight(base, name, shape)


def base_weights_of(layer: AdapterLayer, names: Container[str]) -> dict[str, tuple[int, ...]]:
    """Return the names and the shapes of the weights of the base model that an adapted layer changes.

    A folder contains the expert weights either stacked or, like most folders, separately for each expert.

    Args:
        layer: the layer.
        names: names of the weights of the base model.

    Raises:
        AdapterMismatch: the base model has more experts than the adapter.
    """
    outputs, inputs = layer.shape
    if layer.expert_count is None:
        return {f'{layer.path}.weight': layer.shape}
    if layer.path in names:
        return {layer.path: (layer.expert_count, outputs, inputs)}
    module, _, name = layer.path.rpartition('.')
    parts = SEPARATE_WEIGHTS[name]
    if f'{module}.{layer.expert_count}.{parts[0]}.weight' in names:
        raise AdapterMismatch(
            f'the adapter has {layer.expert_count} experts in {layer.path}, but the base model has more'
        )
    return {
        f'{module}.{expert}.{part}.weight': (outputs // len(parts), inputs)
        for expert in range(layer.expert_count)
        for part in parts
    }


def _check_weight(base: Shapes, name: str, shape: tuple[int, ...]) -> None:
    weight = base.get(name)
    if weight is None:
        raise AdapterMismatch(f'the base model has no linear layer {name.removesuffix(".weight")}')
    if weight != shape:
        raise AdapterMismatch(f'{name} has shape {list(weight)} in the base model, {list(shape)} in the adapter')
