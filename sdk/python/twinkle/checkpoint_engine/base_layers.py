"""Whether an adapter fits a base model, by the shapes of both: no weight is read."""

from collections.abc import Mapping

from twinkle.checkpoint_engine.errors import AdapterMismatch
from twinkle.checkpoint_engine.float_bytes import FLOAT_DTYPES
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle.checkpoint_engine.lora_layers import PREFIX, Shapes, layer_ranks

_HEAD, _EMBEDDINGS = 'lm_head.weight', 'model.embed_tokens.weight'


def layer_shapes(base: ModelFolder) -> Shapes:
    """Return the shape `(out, in)` of each weight that an adapter can be of, by its name in the model.

    An output head that is tied to the embeddings has their shape.
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
        base: of `layer_shapes`; None: not known, so that its ranks alone are checked.
        adapter: shape of each of its tensors, by canonical name.
        max_rank: highest rank that is taken.

    Raises:
        AdapterMismatch: the model has no such layer or one of another shape, or a rank is too high.
    """
    try:
        ranks = layer_ranks(adapter)
    except ValueError as error:
        raise AdapterMismatch(str(error)) from None
    for path, rank in ranks.items():
        if rank > max_rank:
            raise AdapterMismatch(f'layer {path} has rank {rank}; at most {max_rank} is served here')
        if base is not None:
            a, b = (adapter[f'{PREFIX}{path}.lora_{part}.weight'] for part in 'AB')
            _check_layer(base, path, (b[0], a[1]))


def _check_layer(base: Shapes, path: str, shape: tuple[int, int]) -> None:
    weight = base.get(f'{path}.weight')
    if weight is None:
        raise AdapterMismatch(f'the base model has no linear layer {path}')
    if weight != shape:
        raise AdapterMismatch(f'layer {path} of the base model is {list(weight)}, that of the adapter {list(shape)}')
