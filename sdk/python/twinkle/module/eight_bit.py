"""AdamW whose moments take one byte each, of a library that is an extra."""

import importlib
from functools import cache
from typing import Any

from torch.optim import Optimizer

NAME = 'AdamW8bit'
"""The name it is asked for by."""
_CURE = "needs bitsandbytes, which is not installed here: pip install 'twinkle-grpc[eight-bit]'"


def adamw_8bit() -> type[Optimizer]:
    """Return the class; its state is plain tensors, which can be saved and restored like any other's.

    Matrices of fewer than 4096 elements keep float32 moments (Dettmers et al. 2022, arXiv:2110.02861,
    section 2), so LoRA of a small rank saves less than the name says.

    Raises:
        ValueError: the library is not installed; says how to install it.
    """
    try:
        library: Any = importlib.import_module('bitsandbytes')
    except ImportError as error:
        raise ValueError(_CURE) from error
    return _flat(library.optim.AdamW8bit)


@cache
def _flat(base: Any) -> type[Optimizer]:
    class AdamW8bit(base):
        """`base` with a state as flat as torch's own."""

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
            """Return the state by parameter; the library hides its bytes one level deeper for FSDP's sake."""
            return Optimizer.state_dict(self)

    return AdamW8bit
