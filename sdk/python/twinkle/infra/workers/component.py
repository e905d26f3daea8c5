"""Components that run in workers, and the objects through which the program calls them."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.errors import NotSupportedYet
from twinkle.infra.launcher import check_mesh
from twinkle.infra.workers.dispatch import MethodOptions, combine, divide
from twinkle.infra.workers.group import WorkerGroup
from twinkle.infra.workers.worker import RemoteIterator

_SPECIAL_METHODS = ('__call__', '__contains__', '__getitem__', '__iter__', '__len__')
"""Special methods that run in the workers, like public methods."""


class LazyResult:
    """Result of a call that may still be running. Call the object or pass it as an argument to wait for the result."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = functools.cache(wait)

    def __call__(self) -> Any:
        """Return the result.

        Raises:
            Exception: the method raised it.
        """
        return self._wait()


class RemoteComponent:
    """A component in the workers of a group, and the calls of its methods."""

    def __init__(self, group: WorkerGroup, number: int, *, count: int, mesh: DeviceMesh | None, is_lazy: bool) -> None:
        """Use component `number` of the first `count` workers of a group."""
        self._group = group
        self._number = number
        self._count = count
        self._mesh = mesh
        self._is_lazy = is_lazy

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a method in the workers according to its `remote_function` options, and combine the results."""
        options = MethodOptions(**getattr(function, 'remote_options', {}))
        call = (
            tuple(_waited(value) for value in args),
            {name: _waited(value) for name, value in named.items()},
        )
        calls = divide(function, options, call, count=self._count, mesh=self._mesh)
        first = min(calls)
        results = self._group.call(
            self._number,
            function.__name__,
            calls,
            wanted=lambda index: index == first or options.collect != 'first',
            timeout=options.timeout,
        )

        def wait() -> Any:
            result = combine(options.collect, results(), mesh=self._mesh)
            return self._group.iterate(first, result) if isinstance(result, RemoteIterator) else result

        is_lazy = self._is_lazy if options.lazy_collect is None else options.lazy_collect
        return LazyResult(wait) if is_lazy and not options.sync else wait()

    def read(self, name: str) -> Any:
        """Return an attribute of the component in the first worker."""
        return self._group.read(self._number, name)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The workers of a component."""

    group: WorkerGroup
    mesh: DeviceMesh | None
    """Mesh of the component. None: all workers are data-parallel."""
    is_everywhere: bool
    """Whether all workers of the group create the component, or only the first worker."""
    is_joined: bool
    """See `remote_class`."""
    is_lazy: bool
    """Whether calls return before they complete; the options of a method take precedence."""


def create_component(cls: type, args: tuple[Any, ...], named: dict[str, Any], placement: Placement) -> Any:
    """Create a component in workers; return an object whose public methods and properties use it.

    Args:
        cls: class of the component.
        args: positional arguments of its constructor.
        named: keyword arguments of its constructor, without `remote_group` and `device_mesh`.
        placement: the workers.

    Raises:
        ValueError: the mesh does not have one rank per worker.
        NotSupportedYet: an axis of the mesh is not supported, or each worker is a separate replica and the mesh has
            several ranks along an axis other than `dp`.
        Exception: the constructor raised it.
    """
    group, mesh = placement.group, placement.mesh
    count = group.size if placement.is_everywhere else 1
    taken = inspect.signature(cls.__init__).parameters
    if mesh is not None and placement.is_everywhere:
        check_mesh(mesh, count, group=group.name)
        if not placement.is_joined and mesh.dp_world_size < count:
            raise NotSupportedYet(f'each worker of {cls.__name__} is a replica; use a mesh of dp_size alone')
    # If every worker creates a separate replica, such as a sampler, each replica runs in one process without a mesh.
    if 'device_mesh' in taken and (placement.is_joined or not placement.is_everywhere):
        named['device_mesh'] = mesh
    if 'device' in taken:
        named.setdefault('device', group.device_type)
    number = group.create(cls, args, named, is_joined=placement.is_joined, count=count)
    handle = cast('Any', object.__new__(_handle_class(cls)))
    handle.remote_component = RemoteComponent(group, number, count=count, mesh=mesh, is_lazy=placement.is_lazy)
    return handle


@functools.cache
def _handle_class(cls: type) -> type:
    """Return a subclass of `cls` whose methods and properties use the attribute `remote_component`."""
    members: dict[str, Any] = {'__doc__': cls.__doc__, '__module__': cls.__module__, '__init__': _unused}
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if name.startswith('_') and name not in _SPECIAL_METHODS:
            continue
        if isinstance(member, property):
            members[name] = property(_reader(name), doc=member.__doc__)
        elif inspect.isfunction(member):
            members[name] = _caller(member)
    if hasattr(cls, '__enter__'):
        members |= {'__enter__': _entered, '__exit__': _shut_down}
    handle = type(cls.__name__, (cls,), members)
    # Every abstract method is replaced.
    handle.__abstractmethods__ = frozenset()
    return handle


def _entered(self: Any) -> Any:
    return self


def _shut_down(self: Any, *_: object) -> None:
    self.shutdown()


def _unused(self: Any, *args: Any, **options: Any) -> None:
    del self, args, options


def _caller(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        return self.remote_component.call(function, args, named)

    return call


def _reader(name: str) -> Callable[[Any], Any]:
    def read(self: Any) -> Any:
        return self.remote_component.read(name)

    return read


def _waited(value: Any) -> Any:
    return value() if isinstance(value, LazyResult) else value
