"""Muon for the matrices and AdamW for everything else, as one optimizer."""

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

_KIND = 'is_matrix'
_MUON = ('lr', 'weight_decay', 'momentum', 'nesterov', 'ns_coefficients', 'eps', 'ns_steps', 'adjust_lr_fn')


def is_matrix(parameter: Tensor) -> bool:
    """Whether Muon is meant for a parameter: it has two dimensions, and more than one row and column."""
    return parameter.ndim == 2 and min(parameter.shape) > 1


class Muon(Optimizer):
    """Momentum whose matrices are orthogonalised before they are applied (Jordan et al. 2024, torch.optim.Muon).

    What is no matrix, such as a value head or LoRA of rank 1, is optimised by AdamW with the same rate
    and weight decay: orthogonalising a single row would only normalise it.

    Args:
        params: any; each of their groups is parted in two where it holds both kinds.
        lr: of both.
        adamw_betas: of AdamW.
        adamw_eps: of AdamW.
        options: `weight_decay` of both, and torch.optim.Muon's `momentum`, `nesterov`, `ns_coefficients`, `eps`,
            `ns_steps` and `adjust_lr_fn`; with 'match_rms_adamw' for it, rates good for AdamW are good here.

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
        of_torch = {name: parameter.default for name, parameter in signature(torch.optim.Muon).parameters.items()}
        defaults = {name: of_torch[name] for name in _MUON}
        defaults |= {**options, 'lr': lr, 'adamw_betas': adamw_betas, 'adamw_eps': adamw_eps}
        given = list(params)
        groups = given if given and isinstance(given[0], Mapping) else [{'params': given}]
        super().__init__([part for group in groups for part in _parted(group)], defaults)
        for group in self.param_groups:
            _twin(group, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step every group with the optimizer it is for."""
        for group in self.param_groups:
            _twin(group, self.state).step()


def _parted(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    parameters = list(group['params'])
    kinds = [(kind, [item for item in parameters if is_matrix(item) is kind]) for kind in (True, False)]
    return [{**group, 'params': members, _KIND: kind} for kind, members in kinds if members]


def _twin(group: dict[str, Any], state: Any) -> Optimizer:
    """Return torch's own optimizer of one of our groups; it works on our state."""
    parameters = group['params']
    if group[_KIND]:
        twin: Optimizer = torch.optim.Muon(parameters, **{name: group[name] for name in _MUON})
    else:
        twin = AdamW(
            parameters,
            lr=group['lr'],
            betas=tuple(group['adamw_betas']),
            eps=group['adamw_eps'],
            weight_decay=group['weight_decay'],
        )
    twin.state = state
    return twin
