"""Placement of components on device groups (`remote_group`), with the decorators `remote_class` and `remote_function`.

Programs written for clusters name a group of ranks for each component. In mode 'ray', the component runs in the workers
of the group, and its object in the program calls them. Otherwise, a group of one rank is this process, and the
constructor of a component refuses larger groups.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.errors import NotSupportedYet
from twinkle.infra.logs import get_logger
from twinkle.infra.runtime import refuse_many_ranks, runtime

DEFAULT_GROUP = 'default'
"""Name of the predefined group that contains this process."""

_Class = TypeVar('_Class')
_Function = TypeVar('_Function', bound=Callable[..., Any])

_EXECUTES = ('first', 'peer', 'all')
_DISPATCHES = ('slice', 'all', 'slice_dp', 'first')
_COLLECTS = ('none', 'flatten', 'mean', 'avg', 'sum', 'first', 'last_pp', 'last_pp_first')


def place_here(component: str, remote_group: str | None) -> DeviceGroup | None:
    """Check that a component can run in this process, log its placement, and return its group.

    Args:
        component: name of the component, for messages.
        remote_group: a group passed to `initialize`, or 'default'. None: no group; the function returns None.

    Raises:
        ValueError: the group was not declared, or torch is imported and finds no device of its type.
        NotSupportedYet: the group has several ranks, or its device type is not supported.
    """
    if remote_group is None:
        return None
    groups = {group.name: group for group in runtime().groups}
    group = groups.get(remote_group) or (DeviceGroup(DEFAULT_GROUP, 1) if remote_group == DEFAULT_GROUP else None)
    if group is None:
        raise _unknown_group(component, remote_group, {DEFAULT_GROUP, *groups})
    if group.size > 1:
        raise NotSupportedYet(
            f'{component}: group {remote_group!r} has {group.size} ranks, but the program runs in one process; use '
            "initialize(mode='ray'), or set ranks=1 and start several processes with torchrun"
        )
    _check_device(component, group)
    get_logger().info('component runs in this process component=%s group=%s', component, remote_group)
    return group


def remote_class(
    execute: Literal['first', 'peer', 'all'] = 'peer', *, is_joined: bool = False
) -> Callable[[type[_Class]], type[_Class]]:
    """Return a class decorator that adds `remote_group` and `device_mesh` to the constructor's arguments.

    In mode 'ray', a constructor with `remote_group` creates the component in the group's workers. The returned object
    is an instance of a subclass, whose public methods and properties call the component. Otherwise, a constructor that
    declares `device_mesh` receives it; for other classes, a mesh of one rank is accepted and ignored. A constructor
    that declares `device` receives the device type of the group if it is known, unless the caller sets `device`.

    Args:
        execute: which workers of a group create the component: 'all', or only the first worker ('first' and 'peer').
        is_joined: whether the components of all workers are one model, whose ranks use `torch.distributed`.

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

        cast('Any', cls).__new__ = _new_here_or_in_workers(is_everywhere=execute == 'all', is_joined=is_joined)
        cast('Any', cls).__init__ = init_here
        return cls

    return decorate


def remote_function(
    dispatch: Literal['slice', 'all', 'slice_dp', 'first'] | Callable[..., Any] = 'slice',
    execute: Literal['first', 'peer', 'all'] = 'all',
    collect: Literal['none', 'flatten', 'mean', 'avg', 'sum', 'first', 'last_pp', 'last_pp_first']
    | Callable[..., Any] = 'none',
    *,
    sync: bool = False,
    lazy_collect: bool | None = None,
    timeout: float | None = None,
) -> Callable[[_Function], _Function]:
    """Return a decorator for the methods of a `remote_class` that the program calls.

    With one worker, and in this process, all named dispatch and collect modes are equivalent: the method receives all
    arguments, and its result is returned directly. Methods without the decorator have the options dispatch='all',
    execute='all' and collect='first'. The options are stored in the method's `remote_options`.

    Args:
        dispatch: how the arguments are divided among the workers. The batch is the method's first argument. 'all':
            every worker receives all arguments. 'slice': the batch and all other lists, tuples and arrays, which must
            have its length, are divided into one part per worker. 'slice_dp': they are divided into one part per data
            rank of the mesh; workers with the same data rank receive the same part. Workers without a part are not
            called. 'first': the first worker receives all arguments; for the other workers, empty lists replace the
            batch and all other lists, tuples and arrays. A function `(worker_count, worker, args, named, device_mesh)`
            returns the worker's `args` and `named`.
        execute: which workers are called: 'all', or only the first worker ('first' and 'peer').
        collect: how the workers' results are combined. 'none': a list. 'flatten': one list of the items of all results.
            'mean' (or 'avg') and 'sum': the mean or the sum of numbers, arrays, or mappings of numbers or arrays.
            'first': the result of the first worker. 'last_pp': a list of the results of the last pipeline stage.
            'last_pp_first': the first result of the last pipeline stage. A function `(results, device_mesh)` returns
            the combined result.
        sync: whether a call waits for its completion even if `lazy_collect` is True.
        lazy_collect: whether a call returns a `LazyResult` before it completes. None: the setting of `initialize`.
        timeout: time limit of a call in seconds, after which all workers of the group are killed. None: no limit.

    Raises:
        ValueError: an option has an unknown value.
    """
    for name, value, known in (('dispatch', dispatch, _DISPATCHES), ('collect', collect, _COLLECTS)):
        if not callable(value):
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


def _new_here_or_in_workers(*, is_everywhere: bool, is_joined: bool) -> Callable[..., Any]:
    """Return a `__new__` that creates the component in workers if the program has workers and a group is given."""

    def new(
        cls: type, *args: Any, remote_group: str | None = None, device_mesh: DeviceMesh | None = None, **named: Any
    ) -> Any:
        settings = runtime()
        if remote_group is None or settings.cluster is None:
            return cast('Any', object.__new__(cls))
        groups = settings.cluster.groups
        if remote_group not in groups:
            raise _unknown_group(cls.__name__, remote_group, set(groups))
        library = importlib.import_module('twinkle.infra.workers.component')
        placement = library.Placement(
            group=groups[remote_group],
            mesh=device_mesh or settings.device_mesh,
            is_everywhere=is_everywhere,
            is_joined=is_joined,
            is_lazy=settings.is_lazy,
        )
        return library.create_component(cls, args, named, placement)

    return new


def _unknown_group(component: str, name: str, declared: set[str]) -> ValueError:
    return ValueError(
        f'{component}: unknown group {name!r}, declared groups are {sorted(declared)}; add it with '
        f'initialize(groups=[DeviceGroup({name!r}, ranks=1)]), or leave remote_group out'
    )


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
