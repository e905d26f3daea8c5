"""Checks that an adapter fits a base model by comparing shapes, without reading weights."""

from collections.abc import Mapping

from twinkle.checkpoint_engine.errors import AdapterMismatch
from twinkle.checkpoint_engine.float_bytes import FLOAT_DTYPES
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle.checkpoint_engine.lora_layers import PREFIX, Shapes, layer_ranks

_HEAD, _EMBEDDINGS = 'lm_head.weight', 'model.embed_tokens.weight'


def layer_shapes(base: ModelFolder) -> Shapes:
    """Return the shape of each floating-point matrix of the model, by name; `(out, in)` for linear layers.

    An output head that is tied to the embeddings is included with their shape.
    """
    shapes = {
        name: entry.shape
        for name, entry in base.entries.items()
        if entry.dtype in FLOAT_DTYPES and len(entry.shape) == 2
    }
    if _HEAD not in shapes and _EMBEDDINGS in shapes and base.config.get('tie_word_embeddings', True):
        shapes[_HEAD] = shapes[_EMBEDDINGS]
    return shapes


def check_fit(base: Shapes | None, adapter: Mapping[str, tuple[int, ...]], *, max_rank: int) -> None:
    """Check an adapter against a base model.

    Args:
        base: result of `layer_shapes`. None: unknown; only the ranks are checked.
        adapter: shape of each tensor of the adapter, by canonical name.
        max_rank: highest allowed rank.

    Raises:
        AdapterMismatch: the adapter is inconsistent, a rank is too high, or the model lacks a layer or has another
            shape for it.
    """
    try:
        ranks = layer_ranks(adapter)
    except ValueError as error:
        raise AdapterMismatch(str(error)) from None
    for path, rank in ranks.items():
        if rank > max_rank:
            raise AdapterMismatch(f'layer {path} has rank {rank}, but this server supports ranks up to {max_rank}')
        if base is not None:
            a, b = (adapter[f'{PREFIX}{path}.lora_{part}.weight'] for part in 'AB')
            _check_layer(base, path, (b[0], a[1]))


def _check_layer(base: Shapes, path: str, shape: tuple[int, int]) -> None:
    weight = base.get(f'{path}.weight')
    if weight is None:
        raise AdapterMismatch(f'the base model has no linear layer {path}')
    if weight != shape:
        raise AdapterMismatch(f'layer {path} has shape {list(weight)} in the base model, {list(shape)} in the adapter')
