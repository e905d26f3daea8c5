"""The vLLM engine, which runs `twinkle.sampler.vllm`. The engine core runs in a separate process."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

from twinkle.data_format import StructuredOutput
from twinkle.sampler import errors as library
from twinkle.sampler.engine import SequenceSoFar
from twinkle.sampler.vllm import AdapterSource, VllmAdapter, VllmRequest
from twinkle.sampler.vllm import VllmEngine as LibraryEngine
from twinkle_services.kit.errors import InvalidField, NotSupportedHere, VersionNotFound
from twinkle_services.sampler.backends.engine_events import events_of
from twinkle_services.sampler.backends.prompt_encoder import PromptEncoder
from twinkle_services.sampler.backends.worker_memory import WorkerMemory
from twinkle_services.sampler.domain.adapter import AdapterWeights, VersionKey
from twinkle_services.sampler.domain.errors import AdapterMisfit, ContextExceeded, EngineFailed, EngineInUse
from twinkle_services.sampler.domain.generation import (
    EngineFacts,
    EngineLoad,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    SleepLevel,
    TokenForm,
    TokenPrompt,
)

_log = structlog.get_logger('engine')


@dataclass(frozen=True, kw_only=True)
class VllmEngineOptions:
    """Options of the vLLM engine."""

    base_model: str
    """Name of the model in requests."""
    folder: str
    """Folder of the model."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Engine arguments with their vLLM names."""
    thread_count: int = 1
    """Number of CPU threads of the engine core if it runs on a CPU."""
    hang_seconds: float = 20.0
    """Time without a heartbeat after which the engine core is stopped."""


class VllmEngine:
    """Implements `ports.SamplerEngine`.

    The library cannot park a single request, so the number of events that wait for a slow reader is limited only by the
    request's number of tokens.
    """

    def __init__(self, options: VllmEngineOptions) -> None:
        """Start vLLM. This call blocks for many seconds.

        Raises:
            OSError: The folder does not contain a model.
            ValueError: An engine argument is not supported, or vLLM cannot run the model with the arguments.
        """
        tokenizer = PromptEncoder(options.folder, vocabulary_size=0).tokenizer
        self._engine = LibraryEngine(
            options.folder,
            options.arguments,
            tokenizer=tokenizer,
            thread_count=options.thread_count,
            hang_seconds=options.hang_seconds,
        )
        self._memory = WorkerMemory(self._engine.device_memory)
        facts = self._engine.facts
        self._encoder = PromptEncoder(options.folder, vocabulary_size=facts.vocabulary_size)
        self._adapters: dict[VersionKey, VllmAdapter] = {}
        self._facts = EngineFacts(
            base_model=options.base_model,
            context_tokens=facts.context_tokens,
            vocabulary_size=facts.vocabulary_size,
            parameter_count=facts.parameter_count,
            dtype=facts.dtype,
            max_sequences=facts.max_sequences,
            engine='vllm',
            can_sleep=self._engine.can_sleep,
            tool_call_format=self._encoder.tool_call_format(facts.context_tokens),
        )

    @classmethod
    async def start(cls, options: VllmEngineOptions) -> 'VllmEngine':
        """Start vLLM without blocking the event loop.

        Raises:
            OSError, ValueError: See the constructor.
        """
        return await asyncio.to_thread(cls, options)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def load(self) -> EngineLoad:
        load = self._engine.load
        return EngineLoad(
            running_sequences=load.running_sequences,
            waiting_sequences=load.waiting_sequences,
            kv_usage=load.kv_usage,
            tokens_per_second=load.tokens_per_second,
            prefix_hit_rate=load.prefix_hit_rate,
            is_paused=load.is_paused,
            is_sleeping=load.is_sleeping,
            max_sequences=self._facts.max_sequences,
        )

    @property
    def device_memory(self) -> Mapping[str, int]:
        return self._memory.newest

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, TokenPrompt):
            return self._encoder.encode(prompt, self._facts)
        return await asyncio.to_thread(self._encoder.encode, prompt, self._facts)

    async def describe_tokens(self, token_ids: tuple[int, ...]) -> tuple[TokenForm, ...]:
        return await asyncio.to_thread(self._encoder.describe, token_ids)

    async def load_adapter(self, key: VersionKey, weights: AdapterWeights) -> None:
        if weights.lora_config is None:
            raise AdapterMisfit(weights.adapter_id, 'LoRA weights; these are full-parameter weights')
        source = AdapterSource(config=weights.lora_config, tensors=weights.tensors, segment_path=weights.segment_path)
        try:
            with _domain_errors():
                adapter = await self._engine.add_adapter(str(key.adapter), key.version, source)
        except library.AdapterDoesNotFit as error:
            _log.warning('adapter does not fit', adapter=str(key.adapter), version=key.version, error=str(error))
            needs = f'weights that fit {self._facts.base_model} on this engine'
            raise AdapterMisfit(weights.adapter_id, needs) from error
        replaced = self._adapters.get(key)
        self._adapters[key] = adapter
        if replaced is not None:
            await self._engine.remove_adapter(replaced)

    async def unload_adapter(self, key: VersionKey) -> None:
        adapter = self._adapters.pop(key, None)
        if adapter is not None:
            with _domain_errors():
                await self._engine.remove_adapter(adapter)

    async def replace_base(self, weights: AdapterWeights) -> None:
        if weights.lora_config is not None:
            raise AdapterMisfit(weights.adapter_id, 'full-parameter weights; these are LoRA weights')
        if self._engine.load.is_sleeping:
            raise EngineInUse
        try:
            with _domain_errors():
                await self._engine.replace_base(weights.tensors, version=weights.version)
        except library.SamplerBusy as error:
            raise EngineInUse from error
        except library.BaseDoesNotFit as error:
            _log.warning('full-parameter weights do not fit', run=weights.adapter_id, error=str(error))
            needs = f'weights that fit {self._facts.base_model} on this engine'
            raise AdapterMisfit(weights.adapter_id, needs) from error

    async def check_form(self, form: StructuredOutput, tenant_id: str) -> None:
        with _domain_errors():
            await self._engine.check_form(form, owner=tenant_id)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        if request.adapter is not None and request.adapter not in self._adapters:
            raise VersionNotFound(request.adapter.adapter.name, request.adapter.version)
        engine_request = VllmRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            adapter=self._adapters[request.adapter] if request.adapter else None,
            cache_salt=request.cache_salt,
            continued=tuple(
                SequenceSoFar(token_ids=item.token_ids, is_finished=item.is_finished) for item in request.continued
            ),
        )
        with _domain_errors():
            async with aclosing(self._engine.generate(engine_request)) as events:
                async for event in events:
                    for converted in events_of(event, request):
                        yield converted

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def reset_prefix_cache(self) -> int:
        """Drop cached prefixes, and return an estimate: the tokens of the requests that ended since the last call."""
        with _domain_errors():
            return await self._engine.reset_prefix_cache()

    async def pause(self) -> None:
        with _domain_errors():
            await self._engine.pause()

    async def resume(self) -> None:
        with _domain_errors():
            await self._engine.resume()

    async def sleep(self, level: SleepLevel) -> None:
        try:
            with _domain_errors():
                await self._engine.sleep(int(level))
        except library.SleepUnavailable as error:
            raise NotSupportedHere('sleep', 'vllm') from error

    async def wake_up(self) -> None:
        with _domain_errors():
            await self._engine.wake_up()

    async def wait_until_failed(self) -> None:
        """Return once the engine core has exited or hangs; otherwise read the workers' memory periodically."""
        async with self._memory.reading():
            await self._engine.wait_until_failed()

    async def close(self) -> None:
        await self._engine.close()


@contextmanager
def _domain_errors() -> Generator[None]:
    """Convert the library's errors to domain errors."""
    try:
        yield
    except library.ContextExceeded as error:
        raise ContextExceeded(error.prompt_tokens, error.max_tokens, error.context_tokens) from error
    except library.InvalidSamplingParams as error:
        raise InvalidField(f'params.{error.field}', str(error)) from error
    except library.InvalidPrompt as error:
        raise InvalidField('prompt', str(error)) from error
    except library.InvalidContinuation as error:
        raise InvalidField('continued', str(error)) from error
    except library.EngineFailed as error:
        raise EngineFailed from error
