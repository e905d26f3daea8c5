"""Division of a call's arguments among workers, and combination of their results."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from twinkle.infra.device_mesh import DeviceMesh

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one worker's call."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Options of `remote_function`. The defaults apply to methods without this decorator."""

    dispatch: str | Callable[..., Call] = 'all'
    execute: str = 'all'
    collect: str | Callable[..., Any] = 'first'
    sync: bool = False
    lazy_collect: bool | None = None
    timeout: float | None = None


def divide(
    function: Callable[..., Any], options: MethodOptions, call: Call, *, count: int, mesh: DeviceMesh | None
) -> dict[int, Call]:
    """Return the arguments of each worker that is called.

    Args:
        function: the method; its first parameter after `self` is the batch that 'slice' and 'slice_dp' divide.
        options: options of the method.
        call: arguments of the caller.
        count: number of workers.
        mesh: mesh of the component; None: the workers are data-parallel.

    Raises:
        ValueError: the number of entries of an argument differs from the batch.
    """
    args, named = call
    workers = range(count) if options.execute == 'all' else range(1)
    if callable(options.dispatch):
        return {index: options.dispatch(count, index, args, named, mesh) for index in workers}
    if options.dispatch == 'first':
        return {index: call if index == 0 else _without_batch(call) for index in workers}
    if options.dispatch == 'all' or len(workers) == 1:
        return dict.fromkeys(workers, call)
    is_by_mesh = options.dispatch == 'slice_dp' and mesh is not None
    parts = mesh.data_world_size if is_by_mesh and mesh is not None else count
    sliced = _slices(function, args, named, parts)
    divided: dict[int, Call] = {}
    for index in workers:
        part = mesh.get_data_rank_from_global_rank(index) if is_by_mesh and mesh is not None else index
        if sliced[part] is not None:
            divided[index] = cast('Call', sliced[part])
    return divided


def combine(collect: str | Callable[..., Any], results: Sequence[Any], *, mesh: DeviceMesh | None) -> Any:
    """Return the result of a call from the results of the called workers, in the order of the workers."""
    if callable(collect):
        return collect(list(results), mesh)
    if collect in ('last_pp', 'last_pp_first') and mesh is not None and len(results) == mesh.world_size:
        results = [results[rank] for rank in mesh.get_pp_last_ranks()]
    if collect in ('first', 'last_pp_first') or len(results) == 1:
        return results[0]
    if collect == 'flatten':
        items = [item for result in results for item in result]
        kind = cast('Callable[[list[Any]], Any]', type(results[0]))
        return kind(items) if isinstance(results[0], list) else items
    if collect in ('mean', 'avg', 'sum'):
        return _reduced(results, is_mean=collect != 'sum')
    return list(results)


def _without_batch(call: Call) -> Call:
    """Return the call with empty lists in place of the batch and of all other lists, tuples and arrays."""
    args, named = call
    return (
        tuple([] if position == 0 or _is_batch(value) else value for position, value in enumerate(args)),
        {name: [] if name == 'inputs' or _is_batch(value) else value for name, value in named.items()},
    )


def _slices(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], parts: int
) -> list[Call | None]:
    """Return one call per consecutive part of the batch and all other lists; None for parts without an entry."""
    bound = inspect.signature(function).bind(None, *args, **named)
    batch_name = next(iter(list(bound.arguments)[1:]), '')
    if not batch_name:
        # There is nothing to divide.
        return [(args, named), *[None] * (parts - 1)]
    batch = named[batch_name] if batch_name in named else args[0]
    if not _is_batch(batch) or (len(batch) > 0 and isinstance(batch[0], int | np.integer)):
        # The batch is one example, or the token ids of one prompt.
        return [(args, named), *[None] * (parts - 1)]
    size = len(batch)
    for name, value in [*zip(list(bound.arguments)[1:], args, strict=False), *named.items()]:
        if _is_batch(value) and len(value) != size:
            raise ValueError(f'{name} has {len(value)} entries, but {batch_name} has {size}; give one per example')
    bounds = [size * part // parts for part in range(parts + 1)]
    calls: list[Call | None] = []
    for begin, end in itertools.pairwise(bounds):
        cut = slice(begin, end)
        own: Call = (
            tuple(value[cut] if _is_batch(value) else value for value in args),
            {name: value[cut] if _is_batch(value) else value for name, value in named.items()},
        )
        # An empty batch is sent to the first worker, which handles it as a component without workers would.
        calls.append(own if end > begin or (size == 0 and begin == 0 and not calls) else None)
    return calls


def _is_batch(value: object) -> bool:
    """Return whether a value is a list, a tuple or an array, which is divided like the batch."""
    return isinstance(value, list | tuple) or (hasattr(value, 'shape') and bool(getattr(value, 'shape', ())))


def _reduced(results: Sequence[Any], *, is_mean: bool) -> Any:
    first = results[0]
    if isinstance(first, Mapping):
        names = cast('Iterable[str]', first)
        return {name: _reduced([result[name] for result in results], is_mean=is_mean) for name in names}
    total = sum(results[1:], start=first)
    return total / len(results) if is_mean else total
