"""The reference engine behind the port: `twinkle.sampler.engine` in a thread of its own."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from services.kit.errors import InvalidField
from services.sampler.backends.engine_thread import EngineThread
from services.sampler.backends.mailbox import Mailbox
from services.sampler.backends.prompt_encoder import PromptEncoder
from services.sampler.domain.adapter import AdapterWeights, VersionKey
from services.sampler.domain.errors import AdapterMisfit, ContextExceeded
from services.sampler.domain.generation import (
    EngineFacts,
    EngineLoad,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    PromptComputed,
    SequenceEnded,
    TokenPrompt,
    TokensDrawn,
)
from twinkle.nn import LoraWeights, PackedCausalLM, tensor_of
from twinkle.patch import apply_patches
from twinkle.sampler import errors as library
from twinkle.sampler.engine import EngineAdapter, EngineConfig, EngineEvent, PromptEvent, SamplerEngine, TokenEvent

_log = structlog.get_logger('engine')


@dataclass(frozen=True, kw_only=True)
class TorchEngineOptions:
    """How the engine runs."""

    base_model: str
    """The name callers give."""
    folder: str
    """Where the model is."""
    dtype: str = 'float32'
    device: str = 'cpu'
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any])
    """Changes to the base model as it is loaded: options by name, applied in order."""
    limits: EngineConfig = field(default_factory=EngineConfig)
    mailbox_events: int = 256
    """Events that may wait for a slow reader before its request is held back."""
    stall_seconds: float = 120.0
    """How long a request is held back for its reader before it is ended."""


class TorchEngine:
    """Implements `ports.SamplerEngine`."""

    def __init__(self, options: TorchEngineOptions) -> None:
        """Load the model and start the thread; takes seconds and blocks.

        Raises:
            OSError, UnsupportedModel: the folder holds no model that can be run.
            ValueError: a patch is unknown, or does not fit the model.
        """
        self._model = PackedCausalLM.load(
            options.folder,
            dtype=options.dtype,
            device=options.device,
            prepare=lambda model: apply_patches(model, list(options.patches.items())),
        )
        self._device = options.device
        self._mailbox_events = options.mailbox_events
        self._encoder = PromptEncoder(options.folder, vocabulary_size=self._model.vocab_size)
        engine = SamplerEngine(self._model, tokenizer=self._encoder.tokenizer, config=options.limits)
        self._thread = EngineThread(engine, stall_seconds=options.stall_seconds)
        self._adapters: dict[VersionKey, EngineAdapter] = {}
        self._facts = EngineFacts(
            base_model=options.base_model,
            context_tokens=engine.admission.context_tokens,
            vocabulary_size=self._model.vocab_size,
            parameter_count=self._model.parameter_count,
            dtype=options.dtype,
            max_sequences=options.limits.max_sequences,
        )

    @property
    def facts(self) -> EngineFacts:
        """What does not change while the engine lives."""
        return self._facts

    @property
    def load(self) -> EngineLoad:
        """How busy the engine was after its last step."""
        load = self._thread.load
        return EngineLoad(
            running_sequences=load.running_sequences,
            waiting_sequences=load.waiting_sequences,
            kv_usage=load.kv_tokens_reserved / load.kv_tokens_budget,
            tokens_per_second=self._thread.tokens_per_second,
            is_paused=self._thread.is_paused,
        )

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the prompt as tokens; see the port."""
        if isinstance(prompt, TokenPrompt):
            return self._encoder.encode(prompt, self._facts)
        return await asyncio.to_thread(self._encoder.encode, prompt, self._facts)

    async def load_adapter(self, key: VersionKey, weights: AdapterWeights) -> None:
        """Make a version usable; see the port."""
        self._adapters[key] = await asyncio.to_thread(self._build_adapter, key, weights)

    async def unload_adapter(self, key: VersionKey) -> None:
        """Forget a version; see the port."""
        self._adapters.pop(key, None)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Run a request; see the port."""
        mailbox = Mailbox(asyncio.get_running_loop(), limit=self._mailbox_events)
        adapter = self._adapters[request.adapter] if request.adapter else None
        open_sequences = request.params.num_samples
        begin = partial(self._thread.add, request.request_id, request.prompt_token_ids, request.params)
        try:
            await self._call(partial(begin, adapter=adapter, mailbox=mailbox))
            while open_sequences:
                for event in await self._take(request, mailbox):
                    yield event
                    open_sequences -= isinstance(event, SequenceEnded)
        finally:
            self._thread.post(partial(self._thread.leave, request.request_id, mailbox))

    async def abort(self, request_id: str) -> None:
        """End a request; see the port."""
        await self._call(partial(self._thread.abort, request_id))

    async def reset_prefix_cache(self) -> int:
        """Return 0: this engine keeps no prefix beyond its request."""
        return 0

    async def pause(self) -> None:
        """Stop between two steps."""
        await self._call(partial(self._thread.set_paused, is_paused=True))

    async def resume(self) -> None:
        """Go on."""
        await self._call(partial(self._thread.set_paused, is_paused=False))

    async def close(self) -> None:
        """End the thread; readers that are left get nothing more."""
        await asyncio.to_thread(self._thread.close)

    async def _take(self, request: GenerationRequest, mailbox: Mailbox) -> list[GenerationEvent]:
        """Wait for news of a request; let it go on if it was held back for its reader."""
        events, was_full = await mailbox.take()
        if was_full:
            self._thread.post(partial(self._thread.unpark, request.request_id))
        return [news for event in events for news in _events(event, request)]

    async def _call(self, command: Callable[[], None]) -> None:
        try:
            await self._thread.call(command)
        except library.ContextExceeded as error:
            raise ContextExceeded(error.prompt_tokens, error.max_tokens, error.context_tokens) from error
        except library.InvalidSamplingParams as error:
            raise InvalidField(f'params.{error.field}', str(error)) from error
        except library.InvalidPrompt as error:
            raise InvalidField('prompt', str(error)) from error

    def _build_adapter(self, key: VersionKey, weights: AdapterWeights) -> EngineAdapter:
        tensors = {name: tensor_of(data) for name, data in weights.tensors.items()}
        try:
            lora = LoraWeights.from_peft_state(self._model.layers, weights.lora_config, tensors, device=self._device)
        except ValueError as error:
            _log.warning('an adapter does not fit', adapter=str(key.adapter), version=key.version, error=str(error))
            needs = f'weights that fit {self._facts.base_model}'
            raise AdapterMisfit(weights.adapter_id, needs) from error
        return EngineAdapter(str(key.adapter), key.version, lora)


def _events(event: EngineEvent, request: GenerationRequest) -> list[GenerationEvent]:
    if isinstance(event, PromptEvent):
        return [
            PromptComputed(token_ids=request.prompt_token_ids, logprobs=event.logprobs, top_logprobs=event.top_logprobs)
        ]
    return _token_events(event)


def _token_events(event: TokenEvent) -> list[GenerationEvent]:
    index = event.sequence_index
    events: list[GenerationEvent] = []
    if event.tokens:
        drawn = TokensDrawn(
            sequence_index=index,
            tokens=event.tokens,
            logprobs=event.logprobs,
            text=event.text,
            version=event.version,
        )
        events.append(drawn)
    if event.stop_reason is not None:
        text = '' if event.tokens else event.text
        ended = SequenceEnded(
            sequence_index=index, stop_reason=event.stop_reason, version_spans=event.version_spans, text=text
        )
        events.append(ended)
    return events
