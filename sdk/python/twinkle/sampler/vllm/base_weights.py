"""Whether tensors are the whole of a base model, before any of its weights is touched."""

from collections.abc import Mapping

from twinkle.data_format import TensorData
from twinkle.sampler.vllm.model_facts import checkpoint_shapes

_TIED_HEAD = 'lm_head.weight'
_FLOATS = ('float32', 'bfloat16', 'float16')


def problem_with(folder: str, tensors: Mapping[str, TensorData]) -> str:
    """Return why the tensors cannot replace the weights of the model in `folder`; empty: they can.

    A reload that fails in the middle leaves neither the old nor the new weights, so everything that
    can be known before is asked before.
    """
    wanted = checkpoint_shapes(folder)
    missing = sorted(set(wanted) - set(tensors) - {_TIED_HEAD})
    unknown = sorted(set(tensors) - set(wanted) - {_TIED_HEAD})
    if missing:
        return f'{len(missing)} tensors are missing, such as {missing[0]}'
    if unknown:
        return f'{len(unknown)} tensors are not of this model, such as {unknown[0]}'
    for name, tensor in tensors.items():
        if name in wanted and tensor.shape != wanted[name]:
            return f'{name} is {list(tensor.shape)}, the model has {list(wanted[name])}'
        if tensor.dtype not in _FLOATS:
            return f'{name} is {tensor.dtype}; weights are one of {list(_FLOATS)}'
    return ''
