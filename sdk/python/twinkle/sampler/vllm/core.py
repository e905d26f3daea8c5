"""A wrapper around vLLM's AsyncLLM. Its calls raise an error if the engine fails; callers can wait for a failure."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from twinkle.sampler.errors import EngineFailed
from twinkle.sampler.vllm.heartbeat import HANG_SECONDS, Heartbeat
from twinkle.sampler.vllm.load import EngineStats
from twinkle.sampler.vllm.model_facts import ModelFacts, read_model_facts
from twinkle.sampler.vllm.options import engine_args, engine_config, is_cpu, prepare_environment

_Result = TypeVar('_Result')
_log = logging.getLogger(__name__)

_ALIVE_CHECK_SECONDS = 0.05
"""Interval between two checks for a failure of the engine."""
_SHUTDOWN_SECONDS = 0.5
"""Time limit for a regular shutdown of the engine core, which has no data to save."""
_LONG_METHODS = ('twinkle_replace_base', 'twinkle_restore')
"""Worker methods that load a complete model."""


def make_async_llm(folder: str, args: Mapping[str, Any], *, thread_count: int = 1) -> AsyncLLM:
    """Start vLLM with the settings of `VllmEngine` and return the AsyncLLM. Blocks for many seconds.

    Raises:
        ValueError: an argument is not supported, or vLLM cannot run the model with the arguments.
    """
    prepare_environment(thread_count=thread_count)
    given = engine_args(folder, args)
    return AsyncLLM.from_vllm_config(
        engine_config(given),
        enable_log_requests=given.enable_log_requests,
        disable_log_stats=given.disable_log_stats,
    )


class VllmCore:
    """One AsyncLLM. The constructor starts vLLM and blocks for many seconds.

    Args:
        folder: model folder in the Hugging Face layout.
        args: arguments of vLLM's engine.
        thread_count: number of CPU threads of the engine core, if it runs on a CPU.
        hang_seconds: time without response after which the engine core is killed.

    Raises:
        ValueError: an argument is not supported, or vLLM cannot run the model with the arguments and this dtype.

    Concurrency: create the core in any thread, and use the core on one event loop.
    """

    def __init__(
        self, folder: str, args: Mapping[str, Any], *, thread_count: int, hang_seconds: float = HANG_SECONDS
    ) -> None:
        prepare_environment(thread_count=thread_count)
        self.args = engine_args(folder, args)
        config = engine_config(self.args)
        self.facts: ModelFacts = read_model_facts(folder, config)
        if self.facts.dtype != self.args.dtype:
            raise ValueError(
                f'vLLM would use the dtype {self.facts.dtype} instead of {self.args.dtype}; set another dtype'
            )
        self.stats = EngineStats()
        self._llm = AsyncLLM.from_vllm_config(config, stat_loggers=[self.stats.make], disable_log_stats=True)
        self._is_failed = False
        self._heartbeat = Heartbeat(
            lambda: self._llm.engine_core.call_utility_async('is_scheduler_paused'),
            lambda: [process.pid for process in self._processes],
            self._kill,
            hang_seconds=hang_seconds,
            is_computing_trusted=is_cpu(),
        )

    @property
    def is_failed(self) -> bool:
        """Whether the engine has failed permanently."""
        if not self._is_failed:
            self._is_failed = self._llm.errored
        return self._is_failed

    def fail(self) -> None:
        """Mark the engine as failed, because its state is undefined."""
        self._is_failed = True

    def check(self) -> None:
        """Check that the engine has not failed.

        Raises:
            EngineFailed: the engine has failed.
        """
        if self.is_failed:
            raise EngineFailed('the vLLM engine has failed; start another')

    async def wait_until_failed(self) -> None:
        """Wait until the engine fails or hangs."""
        with self._heartbeat.watching():
            await self._failure()

    def watching(self) -> AbstractContextManager[None]:
        """Return a context in which a hanging engine core is killed, so that callers do not wait indefinitely."""
        return self._heartbeat.watching()

    def generate(
        self, engine_id: str, token_ids: list[int], params: SamplingParams, *, lora: LoRARequest | None, salt: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Sample one sequence for a prompt. Read the generator inside `watching`."""
        return self._llm.generate(tokens_input(token_ids, cache_salt=salt), params, engine_id, lora_request=lora)

    async def abort(self, engine_ids: list[str]) -> None:
        """Cancel sequences. Unknown ids are ignored."""
        if engine_ids and not self.is_failed:
            await self._llm.abort(engine_ids)

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker between two steps, and return the results.

        Raises:
            EngineFailed: the engine failed before the workers responded.
        """
        is_long = method in _LONG_METHODS
        return await self._unless_failed(lambda: self._llm.collective_rpc(method, args=args), is_long=is_long)

    async def pause(self) -> None:
        """Pause between two steps. Requests keep their memory."""
        await self._unless_failed(lambda: self._llm.pause_generation(mode='keep', clear_cache=False))

    async def resume(self) -> None:
        """Resume after `pause`."""
        await self._unless_failed(self._llm.resume_generation)

    async def reset_prefix_cache(self) -> None:
        """Free the cached prefixes. vLLM frees nothing while a request is running."""
        await self._unless_failed(self._llm.reset_prefix_cache)

    async def sleep(self, level: int) -> None:
        """Release the accelerator's memory. Running requests are aborted."""
        await self._unless_failed(lambda: self._llm.sleep(level), is_long=True)

    async def wake_up(self) -> None:
        """Allocate the memory again."""
        await self._unless_failed(self._llm.wake_up, is_long=True)

    async def close(self) -> None:
        """Stop vLLM's processes and release the resources of this process."""
        if not hasattr(self, '_llm'):
            return
        self._is_failed = True
        await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_SECONDS)
        # vLLM closes its sockets in a callback on this loop and leaves their context to the garbage collector.
        await asyncio.sleep(0)
        client: Any = self._llm.engine_core
        for socket in list(client.ctx._sockets):  # noqa: SLF001 - terminating a context with open sockets blocks
            socket.close(linger=0)
        client.resources.ctx.term()
        # vLLM's finalizer would shut down again, and fail during interpreter exit.
        del self._llm

    @property
    def _processes(self) -> list[Any]:
        """Processes of the engine core on this host."""
        client: Any = self._llm.engine_core
        return list(getattr(client.resources.engine_manager, 'processes', ()))

    def _kill(self) -> None:
        """Kill a hanging core. vLLM then fails all pending calls."""
        _log.error('engine core does not respond; killing it')
        self.fail()
        for process in self._processes:
            process.kill()

    async def _failure(self) -> None:
        while not self.is_failed:  # noqa: ASYNC110 - vLLM sets a flag from another thread
            await asyncio.sleep(_ALIVE_CHECK_SECONDS)

    async def _unless_failed(self, call: Callable[[], Awaitable[_Result]], *, is_long: bool = False) -> _Result:
        """Await a call, or raise if the engine fails first, because a failed engine never responds."""
        self.check()
        response = asyncio.ensure_future(call())
        failure = asyncio.ensure_future(self._failure())
        try:
            with self._heartbeat.watching(is_long=is_long):
                await asyncio.wait({response, failure}, return_when=asyncio.FIRST_COMPLETED)
            if not response.done():
                self.check()
            return await response
        finally:
            response.cancel()
            failure.cancel()
