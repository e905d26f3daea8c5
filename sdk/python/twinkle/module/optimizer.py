"""Optimizers: the classes of torch.optim by name, Muon, 8-bit AdamW, or a custom class."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from twinkle.component import InvalidComponentOptions, UnknownComponent, check_options
from twinkle.module import eight_bit
from twinkle.module.muon import Muon
from twinkle.module.parameter_groups import PATTERN, split_parameters
from twinkle.module.rehearsal import REFUSALS, problem_of, rehearse_optimizer

GROUPS = 'groups'
"""Option of every optimizer: a list of parameter groups whose options differ."""
_NOT_USABLE = frozenset({'LBFGS', 'Muon', 'SparseAdam'})
"""LBFGS evaluates the loss itself, SparseAdam needs sparse gradients, and torch's Muon supports only matrices."""


def optimizer_names() -> tuple[str, ...]:
    """Return the names that `build_optimizer` accepts, sorted, including names of optional libraries."""
    return tuple(sorted(_classes()))


def build_optimizer(
    optimizer: str | type[Optimizer], parameters: Mapping[str, Tensor] | Sequence[Tensor], options: Mapping[str, Any]
) -> Optimizer:
    """Build an optimizer of `parameters`, which are not changed.

    Args:
        optimizer: a name or a class.
        parameters: parameters to optimize, by path; only `groups` needs the paths.
        options: arguments of its constructor, such as `lr`, and `groups`: a list of mappings with a `pattern` for
            paths (see `parameter_groups.matches`) and the options that differ for them. A parameter belongs to the
            first matching group; in `param_groups`, parameters without a group come first.

    Raises:
        UnknownComponent: the name is unknown.
        InvalidComponentOptions: an option is unknown or out of range, a pattern matches no parameter, or the
            optimizer's library is not installed.
    """
    cls = _class_of(optimizer)
    name = optimizer if isinstance(optimizer, str) else cls.__name__
    own = {option: value for option, value in options.items() if option != GROUPS}
    check_options('optimizer', name, cls, own, given=('params',))
    try:
        groups = _groups(cls, parameters, options.get(GROUPS, ()), with_tuples(own))
        for group in groups:
            differing = {key: value for key, value in group.items() if key not in ('params', PATTERN)}
            rehearse_optimizer(cls, with_tuples({**own, **differing}), like=group['params'][0])
        return cls(groups, **with_tuples(own))
    except REFUSALS as error:
        raise InvalidComponentOptions('optimizer', name, problem_of(error, own)) from error


def _class_of(optimizer: str | type[Optimizer]) -> type[Optimizer]:
    if not isinstance(optimizer, str):
        return optimizer
    find = _classes().get(optimizer)
    if find is None:
        raise UnknownComponent('optimizer', optimizer, optimizer_names())
    try:
        return find()
    except ValueError as error:
        raise InvalidComponentOptions('optimizer', optimizer, str(error)) from error


def _groups(
    cls: type[Optimizer], parameters: Mapping[str, Tensor] | Sequence[Tensor], groups: Any, own: Mapping[str, Any]
) -> list[dict[str, Any]]:
    named = parameters if isinstance(parameters, Mapping) else {}
    if not groups:
        return [{'params': list(named.values() if named else parameters)}]
    if not named:
        raise ValueError('groups require parameters with paths')
    # Only options that torch stores per group may differ per group.
    allowed = frozenset(cls([torch.zeros(2, 2, requires_grad=True)], **own).defaults)
    split = split_parameters(named, groups, allowed=allowed)
    return [with_tuples(group, besides='params') for group in split]


def with_tuples(options: Mapping[str, Any], *, besides: str = '') -> dict[str, Any]:
    """Return the options with lists as tuples, except the value of `besides`."""
    # JSON and protobuf only have lists; torch requires tuples for options such as `betas`.
    return {
        key: tuple(value) if isinstance(value, list) and key != besides else value for key, value in options.items()
    }


def _classes() -> dict[str, Callable[[], type[Optimizer]]]:
    found: dict[str, Callable[[], type[Optimizer]]] = {eight_bit.NAME: eight_bit.adamw_8bit}
    if hasattr(torch.optim, 'Muon'):  # from torch 2.9 on
        found['Muon'] = lambda: Muon
    for name, cls in vars(torch.optim).items():
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer and name not in _NOT_USABLE:
            found[name] = lambda cls=cls: cls
    return found
