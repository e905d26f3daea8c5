"""The reference engine, which runs `twinkle.sampler.engine` in a dedicated thread."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from twinkle.data_format import LoraConfig, StructuredOutput
from twinkle.nn import LoraWeights, PackedCausalLM, device_memory, replace_parameters, tensor_of
from twinkle.patch import apply_patches
from twinkle.sampler import errors as library
from twinkle.sampler.engine import (
    EngineAdapter,
    EngineConfig,
    SamplerEngine,
    SequenceSoFar,
)
from twinkle_services.kit import failpoints
from twinkle_services.kit.errors import InvalidField, NotSupportedHere, VersionNotFound
from twinkle_services.sampler.backends.engine_events import events_of
from twinkle_services.sampler.backends.engine_thread import EngineThread
from twinkle_services.sampler.backends.mailbox import Mailbox
from twinkle_services.sampler.backends.prompt_encoder import PromptEncoder
from twinkle_services.sampler.domain.adapter import AdapterWeights, VersionKey
from twinkle_services.sampler.domain.errors import AdapterMisfit, ContextExceeded, EngineInUse
from twinkle_services.sampler.domain.generation import (
    EngineFacts,
    EngineLoad,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    SequenceFinished,
    SleepLevel,
    TokenForm,
    TokenPrompt,
)

_log = structlog.get_logger('engine')


@dataclass(frozen=True, kw_only=True)
class TorchEngineOptions:
    """Options of the torch engine."""

    base_model: str
    """Name of the model in requests."""
    folder: str
    """Folder of the model."""
    dtype: str = 'float32'
    """Torch dtype of the frozen weights, or 'auto'; see `twinkle.nn.chosen_dtype`."""
    device: str = 'cpu'
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any])
    """Patches of the base model, as a mapping from name to options, in the order in which they are applied."""
    limits: EngineConfig = field(default_factory=EngineConfig)
    mailbox_events: int = 256
    """Maximum number of events that wait for a slow reader before its request is parked, that is, suspended."""
    stall_seconds: float = 120.0
    """Maximum time that a request stays parked before it is aborted."""


class TorchEngine:
    """Implements `ports.SamplerEngine`."""

    def __init__(self, options: TorchEngineOptions) -> None:
        """Load the model and start the thread. This call blocks for several seconds.

        Raises:
            OSError, UnsupportedModel: The folder does not contain a supported model.
            ValueError: A patch is unknown or does not fit the model, or a limit is too small.
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
        self._base: EngineAdapter | None = None
        self._facts = EngineFacts(
            base_model=options.base_model,
            context_tokens=engine.admission.context_tokens,
            vocabulary_size=self._model.vocab_size,
            parameter_count=self._model.parameter_count,
            dtype=self._model.dtype_name,
            max_sequences=options.limits.max_sequences,
            engine='torch',
            can_sleep=False,
            tool_call_format=self._encoder.tool_call_format(engine.admission.context_tokens),
            expert_token_bytes=0 if self._model.routing is None else self._model.routing.token_bytes,
        )

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def load(self) -> EngineLoad:
        """Load of the engine after its last step or command."""
        load = self._thread.load
        return EngineLoad(
            running_sequences=load.running_sequences,
            waiting_sequences=load.waiting_sequences,
            kv_usage=load.cache_bytes_reserved / load.cache_bytes_budget,
            tokens_per_second=self._thread.tokens_per_second,
            is_paused=self._thread.is_paused,
            max_sequences=self._facts.max_sequences,
        )

    @property
    def device_memory(self) -> Mapping[str, int]:
        return device_memory(self._device)

    @property
    def buffered_events(self) -> int:
        """Number of events that wait for readers; at most `mailbox_events` for each request, plus those of one step."""
        return self._thread.buffered_events

    @property
    def step_rows(self) -> int:
        """Number of rows that the last step computed; 0 if all requests are done or parked."""
        return self._thread.engine.last_step_rows

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, TokenPrompt):
            return self._encoder.encode(prompt, self._facts)
        return await asyncio.to_thread(self._encoder.encode, prompt, self._facts)

    async def describe_tokens(self, token_ids: tuple[int, ...]) -> tuple[TokenForm, ...]:
        return await asyncio.to_thread(self._encoder.describe, token_ids)

    async def load_adapter(self, key: VersionKey, weights: AdapterWeights) -> None:
        self._adapters[key] = await asyncio.to_thread(self._build_adapter, key, weights)

    async def unload_adapter(self, key: VersionKey) -> None:
        self._adapters.pop(key, None)

    async def replace_base(self, weights: AdapterWeights) -> None:
        await self._thread.call(partial(self._replace_base, weights))

    async def check_form(self, form: StructuredOutput, tenant_id: str) -> None:
        """Do nothing: this engine has no structured output, and `generate` refuses it."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        mailbox = Mailbox(asyncio.get_running_loop(), limit=self._mailbox_events)
        adapter = self._adapter(request.adapter) if request.adapter else self._base
        open_sequences = request.open_sequences
        begin = partial(self._thread.add, request.request_id, request.prompt_token_ids, request.params)
        so_far = [SequenceSoFar(token_ids=item.token_ids, is_finished=item.is_finished) for item in request.continued]
        try:
            await self._call(partial(begin, adapter=adapter, mailbox=mailbox, continued=so_far))
            while open_sequences:
                for event in await self._take(request, mailbox):
                    yield event
                    open_sequences -= isinstance(event, SequenceFinished)
        finally:
            self._thread.post(partial(self._thread.remove, request.request_id, mailbox))

    async def abort(self, request_id: str) -> None:
        await self._call(partial(self._thread.abort, request_id))

    async def reset_prefix_cache(self) -> int:
        """Return 0: this engine has no prefix cache."""
        return 0

    async def pause(self) -> None:
        await self._call(partial(self._thread.set_paused, is_paused=True))

    async def resume(self) -> None:
        await self._call(partial(self._thread.set_paused, is_paused=False))

    async def sleep(self, level: SleepLevel) -> None:
        """Raise `NotSupportedHere`: this engine cannot release its memory."""
        del level
        raise NotSupportedHere('sleep', self._facts.engine)

    async def wake_up(self) -> None:
        """Do nothing: this engine never sleeps."""

    async def wait_until_failed(self) -> None:
        await self._thread.wait_until_failed()

    async def close(self) -> None:
        """Stop the thread; the readers of remaining requests raise `EngineFailed`."""
        await asyncio.to_thread(self._thread.close)

    async def _take(self, request: GenerationRequest, mailbox: Mailbox) -> list[GenerationEvent]:
        """Wait for events of a request, and unpark it if the mailbox was full."""
        events, was_full = await mailbox.take()
        if was_full:
            self._thread.post(partial(self._thread.unpark, request.request_id))
        return [converted for event in events for converted in events_of(event, request)]

    async def _call(self, command: Callable[[], None]) -> None:
        try:
            await self._thread.call(command)
        except library.ContextExceeded as error:
            raise ContextExceeded(error.prompt_tokens, error.max_tokens, error.context_tokens) from error
        except library.InvalidSamplingParams as error:
            raise InvalidField(f'params.{error.field}', str(error)) from error
        except library.InvalidContinuation as error:
            raise InvalidField('continued', str(error)) from error
        except library.NotSupportedByEngine as error:
            raise NotSupportedHere(error.what, self._facts.engine) from error
        except library.InvalidPrompt as error:
            raise InvalidField('prompt', str(error)) from error

    def _adapter(self, key: VersionKey) -> EngineAdapter:
        if key not in self._adapters:
            raise VersionNotFound(key.adapter.name, key.version)
        return self._adapters[key]

    def _replace_base(self, weights: AdapterWeights) -> None:
        """Replace the weights; engine thread only."""
        if not self._thread.engine.is_idle:
            raise EngineInUse
        missing = self._model.base_parameters.keys() - weights.tensors.keys()
        if weights.lora_config is not None or missing:
            raise AdapterMisfit(weights.adapter_id, f'every weight of {self._facts.base_model}')
        try:
            replace_parameters(self._model, weights.tensors, before_each=lambda: failpoints.reach('replacement.tensor'))
        except ValueError as error:
            _log.warning('full-parameter weights do not fit', run=weights.adapter_id, error=str(error))
            raise AdapterMisfit(weights.adapter_id, f'weights that fit {self._facts.base_model}') from error
        except Exception:
            # Some weights are new and some are old; no request may use this mixture.
            self._thread.post(self._thread.fail)
            raise
        # An adapter without layers: it only labels tokens with the version of the base weights.
        label = EngineAdapter('', weights.version, LoraWeights(LoraConfig(), {}, seed=0))
        self._base = label if weights.version else None

    def _build_adapter(self, key: VersionKey, weights: AdapterWeights) -> EngineAdapter:
        tensors = {name: tensor_of(data) for name, data in weights.tensors.items()}
        try:
            lora = LoraWeights.from_peft_state(self._model.targets, weights.lora_config, tensors, device=self._device)
        except ValueError as error:
            _log.warning('adapter does not fit', adapter=str(key.adapter), version=key.version, error=str(error))
            needs = f'weights that fit {self._facts.base_model}'
            raise AdapterMisfit(weights.adapter_id, needs) from error
        return EngineAdapter(str(key.adapter), key.version, lora)
