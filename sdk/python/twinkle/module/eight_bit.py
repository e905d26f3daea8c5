"""AdamW with 8-bit moments, from the optional library bitsandbytes."""

import importlib
from functools import cache
from typing import Any

from torch.optim import Optimizer

NAME = 'AdamW8bit'
"""Name of the optimizer in `build_optimizer`."""
_NOT_INSTALLED = "needs bitsandbytes, which is not installed; run pip install 'twinkle-grpc[eight-bit]'"


def adamw_8bit() -> type[Optimizer]:
    """Return the optimizer class; its state consists of plain tensors and can be saved like any other.

    Matrices of fewer than 4096 elements keep float32 moments (Dettmers et al. 2022, arXiv:2110.02861, section 2), so
    LoRA with a small rank saves less memory than the name suggests.

    Raises:
        ValueError: the library is not installed; the message explains how to install it.
    """
    try:
        library: Any = importlib.import_module('bitsandbytes')
    except ImportError as error:
        raise ValueError(_NOT_INSTALLED) from error
    return _flat(library.optim.AdamW8bit)


@cache
def _flat(base: Any) -> type[Optimizer]:
    class AdamW8bit(base):
        """`base` with a state of the same layout as torch's optimizers."""

        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 1e-2,
        ) -> None:
            super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

        def state_dict(self) -> dict[str, Any]:
            """Return the state by parameter; the library nests its tensors one level deeper for FSDP."""
            return Optimizer.state_dict(self)

    return AdamW8bit
