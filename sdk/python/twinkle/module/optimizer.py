"""Optimizers: the classes of torch.optim by name, or a class of your own."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from twinkle.component import InvalidComponentOptions, UnknownComponent, check_options
from twinkle.module.rehearsal import REFUSALS, rehearse_optimizer

_NOT_USABLE = frozenset({'LBFGS', 'SparseAdam', 'Muon'})
"""LBFGS evaluates the loss itself, SparseAdam wants sparse gradients, Muon refuses what is no hidden matrix."""


def optimizer_names() -> tuple[str, ...]:
    """Return the names `build_optimizer` takes, sorted."""
    return tuple(sorted(_classes()))


def build_optimizer(
    optimizer: str | type[Optimizer], parameters: list[Tensor], options: Mapping[str, Any]
) -> Optimizer:
    """Return an optimizer of `parameters`.

    Args:
        optimizer: a name, or a class.
        parameters: what it changes.
        options: of its constructor, such as `lr`.

    Raises:
        UnknownComponent: the name is not known.
        InvalidComponentOptions: an option is unknown or out of range.
    """
    cls = _classes().get(optimizer) if isinstance(optimizer, str) else optimizer
    if cls is None:
        raise UnknownComponent('optimizer', str(optimizer), optimizer_names())
    check_options('optimizer', cls.__name__, cls, options, given=('params',))
    # JSON and protobuf have lists only, torch wants `betas` and the like as tuples.
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    try:
        rehearse_optimizer(cls, options, like=parameters[0])
        return cls(parameters, **options)
    except REFUSALS as error:
        raise InvalidComponentOptions('optimizer', cls.__name__, str(error)) from error


def _classes() -> dict[str, type[Optimizer]]:
    return {
        name: cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer and name not in _NOT_USABLE
    }
