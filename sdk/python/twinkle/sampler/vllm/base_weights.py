"""Check that tensors are a complete base model, before any of its weights is replaced."""

from collections.abc import Mapping

from twinkle.data_format import TensorData
from twinkle.sampler.vllm.model_facts import checkpoint_shapes

_TIED_HEAD = 'lm_head.weight'
_FLOATS = ('float32', 'bfloat16', 'float16')


def problem_with(folder: str, tensors: Mapping[str, TensorData]) -> str:
    """Return the reason why the tensors cannot replace the weights of the model in `folder`, or '' if they can.

    A reload that fails halfway leaves the model in an undefined state, so as much as possible is checked first.
    """
    expected = checkpoint_shapes(folder)
    missing = sorted(set(expected) - set(tensors) - {_TIED_HEAD})
    unknown = sorted(set(tensors) - set(expected) - {_TIED_HEAD})
    if missing:
        return f'{len(missing)} tensors are missing, such as {missing[0]}'
    if unknown:
        return f'{len(unknown)} tensors do not belong to this model, such as {unknown[0]}'
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name]:
            return f'{name} has shape {list(tensor.shape)}, the model has {list(expected[name])}'
        if tensor.dtype not in _FLOATS:
            return f'{name} has the dtype {tensor.dtype}; use one of {list(_FLOATS)}'
    return ''
