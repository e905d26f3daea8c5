"""Muon for matrices and AdamW for all other parameters, as one optimizer."""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

_IS_MATRIX = 'is_matrix'
"""Key of a parameter group: whether Muon applies to its parameters."""
_MUON = ('lr', 'weight_decay', 'momentum', 'nesterov', 'ns_coefficients', 'eps', 'ns_steps', 'adjust_lr_fn')


def is_matrix(parameter: Tensor) -> bool:
    """Return whether Muon applies to a parameter: it has two dimensions, and more than one row and column."""
    return parameter.ndim == 2 and min(parameter.shape) > 1


class Muon(Optimizer):
    """Optimizer that applies the orthogonalized momentum of each matrix (Jordan et al. 2024, torch.optim.Muon).

    Other parameters, such as a value head or LoRA of rank 1, use AdamW with the same rate and weight decay, because
    orthogonalizing a single row only normalizes it.

    Args:
        params: parameters or groups; a group with both kinds is split in two.
        lr: learning rate of both optimizers.
        adamw_betas: betas of AdamW.
        adamw_eps: epsilon of AdamW.
        options: `weight_decay` of both, and `momentum`, `nesterov`, `ns_coefficients`, `eps`, `ns_steps` and
            `adjust_lr_fn` of torch.optim.Muon. `adjust_lr_fn='match_rms_adamw'` allows rates tuned for AdamW.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - set(_MUON))
        if unknown:
            raise TypeError(f'unknown options {unknown}; it takes {sorted((*_MUON, "adamw_betas", "adamw_eps"))}')
        torch_defaults = {name: parameter.default for name, parameter in signature(torch.optim.Muon).parameters.items()}
        defaults = {name: torch_defaults[name] for name in _MUON}
        defaults |= {**options, 'lr': lr, 'adamw_betas': adamw_betas, 'adamw_eps': adamw_eps}
        given = list(params)
        groups = given if given and isinstance(given[0], Mapping) else [{'params': given}]
        super().__init__([part for group in groups for part in _split(group)], defaults)
        for group in self.param_groups:
            _torch_optimizer(group, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every group with its optimizer, after a call of `closure`; return what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _torch_optimizer(group, self.state).step()
        return loss


def _split(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    parameters = list(group['params'])
    kinds = [(kind, [item for item in parameters if is_matrix(item) is kind]) for kind in (True, False)]
    return [{**group, 'params': members, _IS_MATRIX: kind} for kind, members in kinds if members]


def _torch_optimizer(group: dict[str, Any], state: Any) -> Optimizer:
    """Return torch's optimizer for one of the groups; it uses the given state."""
    parameters = group['params']
    if group[_IS_MATRIX]:
        optimizer: Optimizer = torch.optim.Muon(parameters, **{name: group[name] for name in _MUON})
    else:
        optimizer = AdamW(
            parameters,
            lr=group['lr'],
            betas=tuple(group['adamw_betas']),
            eps=group['adamw_eps'],
            weight_decay=group['weight_decay'],
        )
    optimizer.state = state
    return optimizer
