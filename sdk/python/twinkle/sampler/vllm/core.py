"""vLLM's AsyncLLM with what it lacks: calls that end when the engine dies, and a way to wait for that."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from twinkle.sampler.errors import EngineFailed
from twinkle.sampler.vllm.heartbeat import HANG_SECONDS, Heartbeat
from twinkle.sampler.vllm.load import EngineStats
from twinkle.sampler.vllm.model_facts import ModelFacts, read_model_facts
from twinkle.sampler.vllm.options import engine_args, is_cpu, prepare_environment

_Result = TypeVar('_Result')
_log = logging.getLogger(__name__)

_ALIVE_CHECK_SECONDS = 0.05
_SHUTDOWN_SECONDS = 0.5
"""How long the engine core may take to end by itself; it has nothing to save."""
_LONG_METHODS = ('twinkle_replace_base', 'twinkle_restore')
"""Of our side of the workers: those that load a whole model."""


def make_async_llm(folder: str, args: Mapping[str, Any], *, thread_count: int = 1) -> AsyncLLM:
    """Start vLLM as `VllmEngine` does and return it bare; takes many seconds and blocks.

    Raises:
        ValueError: an argument is unknown to vLLM.
    """
    prepare_environment(thread_count=thread_count)
    return AsyncLLM.from_engine_args(engine_args(folder, args))


class VllmCore:
    """One AsyncLLM.

    Concurrency: made in any thread; used on one event loop.
    """

    def __init__(
        self, folder: str, args: Mapping[str, Any], *, thread_count: int, hang_seconds: float = HANG_SECONDS
    ) -> None:
        """Start vLLM; takes many seconds and blocks.

        Args:
            folder: the model in the layout of the hub.
            args: engine arguments as vLLM names them.
            thread_count: CPU threads of the engine core, on a CPU.
            hang_seconds: how long the engine core may give no sign of life before it is ended.

        Raises:
            ValueError: an argument is unknown, or vLLM would compute in another dtype than asked for.
        """
        prepare_environment(thread_count=thread_count)
        self.args = engine_args(folder, args)
        config = self.args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        self.facts: ModelFacts = read_model_facts(folder, config)
        if self.facts.dtype != self.args.dtype:
            raise ValueError(f'vLLM would compute in {self.facts.dtype}, not in {self.args.dtype}; give another dtype')
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
        """Whether the engine is broken for good."""
        if not self._is_failed:
            self._is_failed = self._llm.errored
        return self._is_failed

    def fail(self) -> None:
        """Declare the engine broken: what it holds cannot be relied on any more."""
        self._is_failed = True

    def check(self) -> None:
        """Refuse to go on with a broken engine.

        Raises:
            EngineFailed: it is.
        """
        if self.is_failed:
            raise EngineFailed('the vLLM engine is broken; start another')

    async def wait_until_failed(self) -> None:
        """Return once the engine is broken for good, or hangs."""
        with self._heartbeat.watching():
            await self._death()

    def watching(self) -> AbstractContextManager[None]:
        """Have an engine core that hangs ended within the block, so that nobody waits for it for ever."""
        return self._heartbeat.watching()

    def generate(
        self, engine_id: str, token_ids: list[int], params: SamplingParams, *, lora: LoRARequest | None, salt: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt by one sequence; read it within `watching`."""
        return self._llm.generate(tokens_input(token_ids, cache_salt=salt), params, engine_id, lora_request=lora)

    async def abort(self, engine_ids: list[str]) -> None:
        """End sequences; unknown ones are no error."""
        if engine_ids and not self.is_failed:
            await self._llm.abort(engine_ids)

    async def everywhere(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, between two steps, and return what each says.

        Raises:
            EngineFailed: the engine broke before they answered.
        """
        is_long = method in _LONG_METHODS
        return await self._unless_failed(lambda: self._llm.collective_rpc(method, args=args), is_long=is_long)

    async def pause(self) -> None:
        """Stop between two steps; requests keep their memory."""
        await self._unless_failed(lambda: self._llm.pause_generation(mode='keep', clear_cache=False))

    async def resume(self) -> None:
        """Go on."""
        await self._unless_failed(self._llm.resume_generation)

    async def reset_prefix_cache(self) -> None:
        """Free cached prefixes, where no running request shares the memory with them."""
        await self._unless_failed(self._llm.reset_prefix_cache)

    async def sleep(self, level: int) -> None:
        """Give back the accelerator's memory; requests that run are aborted."""
        await self._unless_failed(lambda: self._llm.sleep(level), is_long=True)

    async def wake_up(self) -> None:
        """Take the memory again."""
        await self._unless_failed(self._llm.wake_up, is_long=True)

    async def close(self) -> None:
        """End vLLM's processes and give back what this one holds for them."""
        if not hasattr(self, '_llm'):
            return
        self._is_failed = True
        await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_SECONDS)
        # vLLM closes its sockets by a callback on this loop, and leaves their context to the garbage collector.
        await asyncio.sleep(0)
        client: Any = self._llm.engine_core
        for socket in list(client.ctx._sockets):  # noqa: SLF001 - a context with an open socket never ends
            socket.close(linger=0)
        client.resources.ctx.term()
        # vLLM shuts down once more when it is collected, which fails while the interpreter ends.
        del self._llm

    @property
    def _processes(self) -> list[Any]:
        """Processes of the engine core on this host, by handle."""
        client: Any = self._llm.engine_core
        return list(getattr(client.resources.engine_manager, 'processes', ()))

    def _kill(self) -> None:
        """End a core that hangs: vLLM tells everybody who waits for it, and whoever owns this engine ends."""
        _log.error('the engine core gives no sign of life; it is ended')
        self.fail()
        for process in self._processes:
            process.kill()

    async def _death(self) -> None:
        while not self.is_failed:  # noqa: ASYNC110 - vLLM sets a flag from a thread of its own
            await asyncio.sleep(_ALIVE_CHECK_SECONDS)

    async def _unless_failed(self, call: Callable[[], Awaitable[_Result]], *, is_long: bool = False) -> _Result:
        """Make a call and await it, but not for ever: the answer of a dead engine never comes."""
        self.check()
        answer = asyncio.ensure_future(call())
        death = asyncio.ensure_future(self._death())
        try:
            with self._heartbeat.watching(is_long=is_long):
                await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self.check()
            return await answer
        finally:
            answer.cancel()
            death.cancel()
