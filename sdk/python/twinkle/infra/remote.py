"""Placement of components on device groups (`remote_group`), with the decorators `remote_class` and `remote_function`.

Programs written for clusters name a group of ranks for each component. A group of one rank is this process, and the
component runs here. Larger groups are not supported: the constructor of the component raises.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.errors import NotSupportedYet
from twinkle.infra.logs import get_logger
from twinkle.infra.runtime import refuse_many_ranks, runtime

DEFAULT_GROUP = 'default'
"""Name of the predefined group that contains this process."""

_Class = TypeVar('_Class')
_Function = TypeVar('_Function', bound=Callable[..., Any])

_EXECUTES = ('first', 'peer', 'all')
_DISPATCHES = ('slice', 'all', 'slice_dp')
_COLLECTS = ('none', 'flatten', 'mean', 'avg', 'sum', 'first', 'last_pp', 'last_pp_first')


def place_here(component: str, remote_group: str | None) -> DeviceGroup | None:
    """Check that a component can run in this process, log it, and return its group.

    Args:
        component: name of the component, for messages.
        remote_group: a group passed to `initialize`, or 'default'. None: no group; the function returns None.

    Raises:
        ValueError: the group was not declared, or this machine has no device of its type.
        NotSupportedYet: the group has several ranks, or its device type is not supported.
    """
    if remote_group is None:
        return None
    groups = {group.name: group for group in runtime().groups}
    group = groups.get(remote_group) or (DeviceGroup(DEFAULT_GROUP, 1) if remote_group == DEFAULT_GROUP else None)
    if group is None:
        raise ValueError(
            f'{component}: unknown group {remote_group!r}, declared groups are {sorted({DEFAULT_GROUP, *groups})}; '
            f'add it with initialize(groups=[DeviceGroup({remote_group!r}, ranks=1)]), or leave remote_group out'
        )
    if group.size > 1:
        raise NotSupportedYet(
            f'{component}: group {remote_group!r} has {group.size} ranks, which is not supported yet; set ranks=1 and '
            f'start several processes with torchrun, or train through `twinkle up`'
        )
    _check_device(component, group)
    get_logger().info('component runs in this process component=%s group=%s', component, remote_group)
    return group


def remote_class(execute: Literal['first', 'peer', 'all'] = 'peer') -> Callable[[type[_Class]], type[_Class]]:
    """Return a class decorator that adds `remote_group` and `device_mesh` to the constructor's arguments.

    A constructor that declares `device_mesh` receives it. For other classes a mesh of one rank is accepted and ignored.

    Args:
        execute: which workers of a group create the object. A group of one rank has one worker, this process.

    Raises:
        ValueError: `execute` is unknown.
    """
    _check_choice('execute', execute, _EXECUTES)

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

    With one rank all dispatch and collect modes are equivalent: the method runs here with all arguments and returns
    its result directly. The options are stored in the method's `remote_options`.

    Args:
        dispatch: how arguments are split among workers.
        execute: which workers are called.
        collect: how the workers' results are combined.
        sync: whether workers wait for each other.
        lazy_collect: whether a call to another process returns before it completes.
        timeout: time limit for a call to another process, in seconds.

    Raises:
        ValueError: an option has an unknown value.
        NotSupportedYet: `dispatch` or `collect` is a function.
    """
    for name, value, known in (('dispatch', dispatch, _DISPATCHES), ('collect', collect, _COLLECTS)):
        if callable(value):
            raise NotSupportedYet(
                f'{name} as a function needs workers, which are not supported yet; use one of {known}'
            )
        _check_choice(name, value, known)
    _check_choice('execute', execute, _EXECUTES)
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
    # Components that do not import torch, such as datasets and templates, run on the CPU.
    torch = sys.modules.get('torch')
    if group.device_type == 'cuda' and torch is not None and not torch.cuda.is_available():
        raise ValueError(
            f"{component}: group {group.name!r} is on 'cuda', but this machine has no CUDA device; "
            f"set device_type='auto' to use the available device"
        )


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f'{name} must be one of {known}, got {value!r}')
