"""One implementation, two faces: `handle.verb(...)` blocks, `handle.verb.aio(...)` is a coroutine.

A verb is written once, as a coroutine or an asynchronous generator, and decorated. Both faces
run it on the connection's own loop, so they may be mixed, from any thread and any other loop.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from opentelemetry import trace

from twinkle_client.rpc.loop import LoopThread

_tracer = trace.get_tracer('twinkle.client')
IS_BLOCKING: ContextVar[bool] = ContextVar('twinkle_client_is_blocking', default=False)
"""Whether somebody waits for the verb that runs, with nothing else to do."""
_Params = ParamSpec('_Params')
_Result = TypeVar('_Result')
_Result_co = TypeVar('_Result_co', covariant=True)


class _End:
    """The end of an iteration, where an exception could not pass through a future."""


_END = _End()


class HasLoop(Protocol):
    """Whatever has remote verbs."""

    @property
    def loop_thread(self) -> LoopThread:
        """Where its coroutines run."""
        ...


_Owner = TypeVar('_Owner', bound=HasLoop)


class RemoteMethod(Generic[_Params, _Result]):
    """A verb that answers once."""

    def __init__(self, owner: HasLoop, function: Callable[..., Coroutine[Any, Any, _Result]]) -> None:
        """Bind `function` to `owner`."""
        self._owner = owner
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        """Do it and wait."""
        mark = IS_BLOCKING.set(True)
        try:
            return self._owner.loop_thread.run(self._traced(*args, **kwargs))
        finally:
            IS_BLOCKING.reset(mark)

    def submit(self, *args: _Params.args, **kwargs: _Params.kwargs) -> Future[_Result]:
        """Begin it and return at once; verbs begin in the order they are submitted."""
        return self._owner.loop_thread.submit(self._traced(*args, **kwargs))

    async def aio(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        """Do it without blocking the caller's event loop; cancelling cancels it."""
        if self._owner.loop_thread.is_current:
            return await self._traced(*args, **kwargs)
        return await asyncio.wrap_future(self.submit(*args, **kwargs))

    async def _traced(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        # The verb's own span says what a call was for; those of its calls are below it.
        with _tracer.start_as_current_span(self._function.__name__, record_exception=False):
            return await self._function(self._owner, *args, **kwargs)


class RemoteStream(Generic[_Params, _Result]):
    """A verb that answers with many items, one at a time."""

    def __init__(self, owner: HasLoop, function: Callable[..., AsyncIterator[_Result]]) -> None:
        """Bind `function` to `owner`."""
        self._owner = owner
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> Iterator[_Result]:
        """Iterate, blocking; leaving the loop ends the call."""
        loop_thread = self._owner.loop_thread
        items = self._function(self._owner, *args, **kwargs)
        try:
            while True:
                item = loop_thread.run(_next(items))
                if isinstance(item, _End):
                    return
                yield item
        finally:
            with suppress(RuntimeError):
                loop_thread.run(_close(items))

    async def aio(self, *args: _Params.args, **kwargs: _Params.kwargs) -> AsyncIterator[_Result]:
        """Iterate without blocking; leaving the loop ends the call."""
        loop_thread = self._owner.loop_thread
        items = self._function(self._owner, *args, **kwargs)
        try:
            while True:
                item = await asyncio.wrap_future(loop_thread.submit(_next(items)))
                if isinstance(item, _End):
                    return
                yield item
        finally:
            await asyncio.wrap_future(loop_thread.submit(_close(items)))


class _Descriptor(Generic[_Owner, _Result_co]):
    """Makes a bound face when a verb is looked up on a handle."""

    def __init__(self, function: Callable[..., Any], face: Callable[[Any, Any], _Result_co]) -> None:
        self._function = function
        self._face = face
        functools.update_wrapper(cast(Any, self), function)

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> '_Descriptor[_Owner, _Result_co]': ...
    @overload
    def __get__(self, instance: _Owner, owner: type[Any]) -> _Result_co: ...
    def __get__(self, instance: _Owner | None, owner: type[Any]) -> 'Any':
        if instance is None:
            return self
        return self._face(instance, self._function)


def remote_method(
    function: Callable[Concatenate[_Owner, _Params], Coroutine[Any, Any, _Result]],
) -> _Descriptor[_Owner, RemoteMethod[_Params, _Result]]:
    """Give a coroutine method its faces."""
    return _Descriptor(function, RemoteMethod[_Params, _Result])


def remote_stream(
    function: Callable[Concatenate[_Owner, _Params], AsyncIterator[_Result]],
) -> _Descriptor[_Owner, RemoteStream[_Params, _Result]]:
    """Give an asynchronous generator method its faces."""
    return _Descriptor(function, RemoteStream[_Params, _Result])


async def _next(items: AsyncIterator[_Result]) -> _Result | _End:
    return await anext(items, _END)


async def _close(items: AsyncIterator[Any]) -> None:
    close = getattr(items, 'aclose', None)
    if close is not None:
        await close()
