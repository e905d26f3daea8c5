"""Where a component runs: in this process, or nowhere yet.

Programs written for clusters name a group of ranks for each component (`remote_group`). Where that group is this
process, the component runs here as if nothing had been named; where it is not, it is refused before it is made.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.logs import get_logger
from twinkle.infra.runtime import NotSupportedYet, refuse_many_ranks, runtime

DEFAULT_GROUP = 'default'
"""The group that needs no declaring: this process."""

_Class = TypeVar('_Class')
_Function = TypeVar('_Function', bound=Callable[..., Any])

_EXECUTES = ('first', 'peer', 'all')
_DISPATCHES = ('slice', 'all', 'slice_dp')
_COLLECTS = ('none', 'flatten', 'mean', 'avg', 'sum', 'first', 'last_pp', 'last_pp_first')


def place_here(component: str, remote_group: str | None) -> DeviceGroup | None:
    """Say that a component runs in this process, and return its group; None where it named none.

    Args:
        component: its name, for messages.
        remote_group: a group of `initialize`, or 'default'.

    Raises:
        ValueError: no group of that name was declared, or this machine has no device of its kind.
        NotSupportedYet: the group is more than this process.
    """
    if remote_group is None:
        return None
    groups = {group.name: group for group in runtime().groups}
    group = groups.get(remote_group) or (DeviceGroup(DEFAULT_GROUP, 1) if remote_group == DEFAULT_GROUP else None)
    if group is None:
        raise ValueError(
            f'{component}: there is no group {remote_group!r}, only {sorted({DEFAULT_GROUP, *groups})}; declare it '
            f'with initialize(groups=[DeviceGroup({remote_group!r}, ranks=1)]), or leave remote_group out'
        )
    if group.size > 1:
        raise NotSupportedYet(
            f'{component}: group {remote_group!r} has {group.size} ranks, which needs torchrun or Ray, and neither is '
            f'supported yet; give it ranks=1 to run in this process, or train through `twinkle up`'
        )
    _check_device(component, group)
    get_logger().info('%s: group %r is this process; it runs here', component, remote_group)
    return group


def remote_class(execute: Literal['first', 'peer', 'all'] = 'peer') -> Callable[[type[_Class]], type[_Class]]:
    """Return a decorator whose classes take `remote_group` and `device_mesh` when they are made.

    A class that takes `device_mesh` itself is given it; for others a mesh of one rank is accepted, and means nothing.

    Args:
        execute: which workers of a group hold the object. In this process, the only one does.

    Raises:
        ValueError: `execute` is unknown.
    """
    _check_word('execute', execute, _EXECUTES)

    def decorate(cls: type[_Class]) -> type[_Class]:
        own_init: Any = cls.__init__
        taken = inspect.signature(own_init).parameters

        @functools.wraps(own_init)
        def init_here(self: Any, *args: Any, remote_group: str | None = None, **kwargs: Any) -> None:
            group = place_here(type(self).__name__, remote_group)
            if 'device_mesh' not in taken:
                refuse_many_ranks(kwargs.pop('device_mesh', None))
            if group is not None and 'device' in taken and group.device_type != 'auto':
                kwargs.setdefault('device', group.device_type)
            own_init(self, *args, **kwargs)

        cast('Any', cls).__init__ = init_here
        return cls

    return decorate


def remote_function(
    dispatch: Literal['slice', 'all', 'slice_dp'] = 'slice',
    execute: Literal['first', 'peer', 'all'] = 'all',
    collect: Literal['none', 'flatten', 'mean', 'avg', 'sum', 'first', 'last_pp', 'last_pp_first'] = 'none',
    *,
    sync: bool = False,
    lazy_collect: bool | None = None,
    timeout: float | None = None,
) -> Callable[[_Function], _Function]:
    """Return a decorator for the methods of a `remote_class` that the driver calls.

    With one rank every way of handing arguments out and results back is the same: the method is called here with
    all of them, and returns what it returns, at once. What was said is kept in its `remote_options`.

    Args:
        dispatch: how arguments are split among workers.
        execute: which workers are called.
        collect: what is made of their results.
        sync: whether workers wait for each other.
        lazy_collect: whether a call between processes returns before it is done.
        timeout: seconds that a call between processes may take.

    Raises:
        ValueError: a word is unknown.
        NotSupportedYet: `dispatch` or `collect` is a function, which has nothing to split here.
    """
    for name, value, known in (('dispatch', dispatch, _DISPATCHES), ('collect', collect, _COLLECTS)):
        if callable(value):
            raise NotSupportedYet(
                f'{name} as a function needs workers, which are not supported yet; use one of {known}'
            )
        _check_word(name, value, known)
    _check_word('execute', execute, _EXECUTES)
    options = {
        'dispatch': dispatch,
        'execute': execute,
        'collect': collect,
        'sync': sync,
        'lazy_collect': lazy_collect,
        'timeout': timeout,
    }

    def decorate(function: _Function) -> _Function:
        cast('Any', function).remote_options = options
        return function

    return decorate


def _check_device(component: str, group: DeviceGroup) -> None:
    if group.device_type not in ('auto', 'cpu', 'cuda'):
        raise NotSupportedYet(
            f'{component}: group {group.name!r} is on {group.device_type!r}, which is not supported yet; '
            f"use 'cpu' or 'cuda'"
        )
    # What does not load torch reads rows or makes tokens, and does so on the CPU of any machine.
    torch = sys.modules.get('torch')
    if group.device_type == 'cuda' and torch is not None and not torch.cuda.is_available():
        raise ValueError(
            f"{component}: group {group.name!r} is on 'cuda', and this machine has none; "
            f"give it device_type='auto' to take what there is"
        )


def _check_word(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f'{name} must be one of {known}, got {value!r}')
