"""Forms of remote methods: `handle.method(...)` blocks, `.aio(...)` is a coroutine, `.submit(...)` returns a future.

A method is written once, as a coroutine or an asynchronous generator, and decorated. All forms run on the
clients' event loop, so they can be mixed and called from any thread and from any other loop.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from opentelemetry import trace

from twinkle_client.errors import Error
from twinkle_client.rpc.loop import LoopThread

_tracer = trace.get_tracer('twinkle.client')
IS_BLOCKING: ContextVar[bool] = ContextVar('twinkle_client_is_blocking', default=False)
"""Whether the running method was called in its blocking form."""
_Params = ParamSpec('_Params')
_Result = TypeVar('_Result')
_Result_co = TypeVar('_Result_co', covariant=True)


class _End:
    """Marks the end of an iteration, because StopAsyncIteration cannot be the result of a future."""


_END = _End()


class HasLoop(Protocol):
    """An object with remote methods."""

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        ...


_Owner = TypeVar('_Owner', bound=HasLoop)


class RemoteMethod(Generic[_Params, _Result]):
    """A bound method with one result."""

    def __init__(self, owner: HasLoop, function: Callable[..., Coroutine[Any, Any, _Result]]) -> None:
        self._owner = owner
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        """Call the method and wait for its result."""
        token = IS_BLOCKING.set(True)
        try:
            return self._owner.loop_thread.run(self._traced(*args, **kwargs))
        except Error as error:
            # The traceback contains only frames of the transport; the message states the failure.
            raise error.with_traceback(None) from None
        finally:
            IS_BLOCKING.reset(token)

    def submit(self, *args: _Params.args, **kwargs: _Params.kwargs) -> Future[_Result]:
        """Start the method and return immediately; methods start in the order of submission."""
        return self._owner.loop_thread.submit(self._traced(*args, **kwargs))

    async def aio(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        """Call the method without blocking the caller's event loop; cancelling the caller cancels the method."""
        if self._owner.loop_thread.is_current:
            return await self._traced(*args, **kwargs)
        return await asyncio.wrap_future(self.submit(*args, **kwargs))

    async def _traced(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        # The spans of the RPCs become children of the method's span.
        with _tracer.start_as_current_span(self._function.__name__, record_exception=False):
            return await self._function(self._owner, *args, **kwargs)


class RemoteStream(Generic[_Params, _Result]):
    """A bound method that yields items."""

    def __init__(self, owner: HasLoop, function: Callable[..., AsyncIterator[_Result]]) -> None:
        self._owner = owner
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> Iterator[_Result]:
        """Iterate over the items and block while waiting for the next item; leaving the `for` loop ends the call."""
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
        """Iterate over the items without blocking; leaving the `async for` loop ends the call."""
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
    """Descriptor that binds a remote method to the handle through which it is accessed."""

    def __init__(self, function: Callable[..., Any], bind: Callable[[Any, Any], _Result_co]) -> None:
        self._function = function
        self._bind = bind
        functools.update_wrapper(cast(Any, self), function)

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> '_Descriptor[_Owner, _Result_co]': ...
    @overload
    def __get__(self, instance: _Owner, owner: type[Any]) -> _Result_co: ...
    def __get__(self, instance: _Owner | None, owner: type[Any]) -> 'Any':
        if instance is None:
            return self
        return self._bind(instance, self._function)

    def __call__(self, instance: _Owner, *args: Any, **kwargs: Any) -> Any:
        """Call the method of an instance, as `Class.method(instance, ...)`."""
        bound: Any = self._bind(instance, self._function)
        return bound(*args, **kwargs)


def remote_method(
    function: Callable[Concatenate[_Owner, _Params], Coroutine[Any, Any, _Result]],
) -> _Descriptor[_Owner, RemoteMethod[_Params, _Result]]:
    """Turn a coroutine method into a `RemoteMethod`."""
    return _Descriptor(function, RemoteMethod[_Params, _Result])


def remote_stream(
    function: Callable[Concatenate[_Owner, _Params], AsyncIterator[_Result]],
) -> _Descriptor[_Owner, RemoteStream[_Params, _Result]]:
    """Turn an asynchronous generator method into a `RemoteStream`."""
    return _Descriptor(function, RemoteStream[_Params, _Result])


async def _next(items: AsyncIterator[_Result]) -> _Result | _End:
    return await anext(items, _END)


async def _close(items: AsyncIterator[Any]) -> None:
    close = getattr(items, 'aclose', None)
    if close is not None:
        await close()
