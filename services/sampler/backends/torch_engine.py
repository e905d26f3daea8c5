"""The reference engine behind the port: `twinkle.sampler.engine` in a thread of its own."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from services.kit import failpoints
from services.kit.errors import InvalidField, NotSupportedHere, VersionNotFound
from services.sampler.backends.engine_events import events_of
from services.sampler.backends.engine_thread import EngineThread
from services.sampler.backends.mailbox import Mailbox
from services.sampler.backends.prompt_encoder import PromptEncoder
from services.sampler.domain.adapter import AdapterWeights, VersionKey
from services.sampler.domain.errors import AdapterMisfit, ContextExceeded, EngineInUse
from services.sampler.domain.generation import (
    EngineFacts,
    EngineLoad,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    SequenceEnded,
    SleepLevel,
    TokenForm,
    TokenPrompt,
)
from twinkle.data_format import LoraConfig, StructuredOutput
from twinkle.nn import LoraWeights, PackedCausalLM, replace_parameters, tensor_of
from twinkle.patch import apply_patches
from twinkle.sampler import errors as library
from twinkle.sampler.engine import (
    EngineAdapter,
    EngineConfig,
    SamplerEngine,
    SequenceSoFar,
)

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
        self._base: EngineAdapter | None = None
        self._facts = EngineFacts(
            base_model=options.base_model,
            context_tokens=engine.admission.context_tokens,
            vocabulary_size=self._model.vocab_size,
            parameter_count=self._model.parameter_count,
            dtype=options.dtype,
            max_sequences=options.limits.max_sequences,
            engine='torch',
            can_sleep=False,
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
            max_sequences=self._facts.max_sequences,
        )

    @property
    def buffered_events(self) -> int:
        """Events that wait for their readers; bounded by `mailbox_events` and one step a request."""
        return self._thread.buffered_events

    @property
    def step_rows(self) -> int:
        """Rows that the last step computed; 0 where everything is done, or held back for its reader."""
        return self._thread.engine.last_step_rows

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the prompt as tokens; see the port."""
        if isinstance(prompt, TokenPrompt):
            return self._encoder.encode(prompt, self._facts)
        return await asyncio.to_thread(self._encoder.encode, prompt, self._facts)

    async def describe_tokens(self, token_ids: tuple[int, ...]) -> tuple[TokenForm, ...]:
        """Return what tokens stand for; see the port."""
        return await asyncio.to_thread(self._encoder.describe, token_ids)

    async def load_adapter(self, key: VersionKey, weights: AdapterWeights) -> None:
        """Make a version usable; see the port."""
        self._adapters[key] = await asyncio.to_thread(self._build_adapter, key, weights)

    async def unload_adapter(self, key: VersionKey) -> None:
        """Forget a version; see the port."""
        self._adapters.pop(key, None)

    async def replace_base(self, weights: AdapterWeights) -> None:
        """Replace the base model's weights; see the port."""
        await self._thread.call(partial(self._replace_base, weights))

    async def check_form(self, form: StructuredOutput, tenant_id: str) -> None:
        """Do nothing: this engine holds no forms, which `generate` says."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Run a request; see the port."""
        mailbox = Mailbox(asyncio.get_running_loop(), limit=self._mailbox_events)
        adapter = self._adapter(request.adapter) if request.adapter else self._base
        open_sequences = request.open_sequences
        begin = partial(self._thread.add, request.request_id, request.prompt_token_ids, request.params)
        so_far = [SequenceSoFar(token_ids=one.token_ids, is_finished=one.is_finished) for one in request.continued]
        try:
            await self._call(partial(begin, adapter=adapter, mailbox=mailbox, continued=so_far))
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

    async def sleep(self, level: SleepLevel) -> None:
        """Refuse: this engine gives nothing back before it ends."""
        del level
        raise NotSupportedHere('sleep', self._facts.engine)

    async def wake_up(self) -> None:
        """Do nothing: it never sleeps."""

    async def wait_until_failed(self) -> None:
        """Return once the thread has died by itself; see the port."""
        await self._thread.wait_until_failed()

    async def close(self) -> None:
        """End the thread; readers that are left get nothing more."""
        await asyncio.to_thread(self._thread.close)

    async def _take(self, request: GenerationRequest, mailbox: Mailbox) -> list[GenerationEvent]:
        """Wait for news of a request; let it go on if it was held back for its reader."""
        events, was_full = await mailbox.take()
        if was_full:
            self._thread.post(partial(self._thread.unpark, request.request_id))
        return [news for event in events for news in events_of(event, request)]

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
        """Replace in the engine's thread."""
        if not self._thread.engine.is_idle:
            raise EngineInUse
        missing = self._model.base_parameters.keys() - weights.tensors.keys()
        if weights.lora_config is not None or missing:
            raise AdapterMisfit(weights.adapter_id, f'every weight of {self._facts.base_model}')
        try:
            replace_parameters(self._model, weights.tensors, before_each=lambda: failpoints.reach('replacement.tensor'))
        except ValueError as error:
            _log.warning('a whole model does not fit', run=weights.adapter_id, error=str(error))
            raise AdapterMisfit(weights.adapter_id, f'weights that fit {self._facts.base_model}') from error
        except Exception:
            # Some weights are new and some are old: nobody is to be answered with them.
            self._thread.post(self._thread.fail)
            raise
        # It changes no layer, and has its tokens say which base drew them.
        unchanged = EngineAdapter('', weights.version, LoraWeights(LoraConfig(), {}, seed=0))
        self._base = unchanged if weights.version else None

    def _build_adapter(self, key: VersionKey, weights: AdapterWeights) -> EngineAdapter:
        tensors = {name: tensor_of(data) for name, data in weights.tensors.items()}
        try:
            lora = LoraWeights.from_peft_state(self._model.targets, weights.lora_config, tensors, device=self._device)
        except ValueError as error:
            _log.warning('an adapter does not fit', adapter=str(key.adapter), version=key.version, error=str(error))
            needs = f'weights that fit {self._facts.base_model}'
            raise AdapterMisfit(weights.adapter_id, needs) from error
        return EngineAdapter(str(key.adapter), key.version, lora)
