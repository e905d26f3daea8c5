"""The vLLM engine with the events of the torch engine: concurrent requests, each with its own adapter version.

vLLM samples the tokens. Text, stop strings and the end of sequences are computed by the code of the torch engine, so
each engine can continue a sequence that the other engine started.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from twinkle.data_format import StopReason, StructuredOutput, TensorData
from twinkle.sampler.engine.admission import Admission
from twinkle.sampler.engine.continuation import Replay, check_continued, replay
from twinkle.sampler.engine.detokenize import IncrementalDetokenizer, TokenDecoder
from twinkle.sampler.engine.request import EngineEvent, TokenEvent
from twinkle.sampler.engine.stopping import StopDetector, StopRules
from twinkle.sampler.errors import (
    BaseDoesNotFit,
    DuplicateRequest,
    EngineFailed,
    InvalidSamplingParams,
    SamplerBusy,
    SleepUnavailable,
)
from twinkle.sampler.vllm.adapter_slots import VllmAdapter
from twinkle.sampler.vllm.adapter_table import AdapterTable
from twinkle.sampler.vllm.base_weights import problem_with
from twinkle.sampler.vllm.core import VllmCore
from twinkle.sampler.vllm.form_check import FormChecker
from twinkle.sampler.vllm.handover import AdapterSource, in_memory_file, layout_of
from twinkle.sampler.vllm.heartbeat import HANG_SECONDS
from twinkle.sampler.vllm.merge import merged
from twinkle.sampler.vllm.model_facts import ModelFacts
from twinkle.sampler.vllm.options import is_cpu
from twinkle.sampler.vllm.probes import probe_prompt
from twinkle.sampler.vllm.request import Run, Sequence, VllmRequest, prompt_event
from twinkle.sampler.vllm.sampling import vllm_params
from twinkle.telemetry import summed


@dataclass(frozen=True, kw_only=True)
class VllmLoad:
    """The load of an engine."""

    running_sequences: int
    waiting_sequences: int
    kv_usage: float
    """Fraction of the key-value memory in use, 0 to 1."""
    tokens_per_second: float
    prefix_hit_rate: float
    is_paused: bool
    is_sleeping: bool


class VllmEngine:
    """Samples completions on a shared base model, each request with its own adapter version.

    The constructor starts vLLM and blocks for many seconds.

    Args:
        folder: model folder in the Hugging Face layout.
        args: arguments of vLLM's engine.
        tokenizer: converts tokens to text. None: events have no text, and stop strings are refused.
        thread_count: number of CPU threads of the engine core, if it runs on a CPU.
        hang_seconds: time without response after which the engine core is killed. The limit is ten times as long
            while the core measurably computes on a CPU or loads weights.

    Raises:
        ValueError: an argument is not supported, or vLLM cannot run the model with these arguments.

    Concurrency: create the engine in any thread, and use the engine on one event loop, from any number of tasks.
    """

    def __init__(
        self,
        folder: str,
        args: Mapping[str, Any] | None = None,
        *,
        tokenizer: TokenDecoder | None = None,
        thread_count: int = 1,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._core = VllmCore(folder, args or {}, thread_count=thread_count, hang_seconds=hang_seconds)
        self._adapters = AdapterTable(self._core)
        self.facts: ModelFacts = self._core.facts
        self.admission = Admission(
            vocab_size=self.facts.vocabulary_size,
            context_tokens=self.facts.context_tokens,
            is_text_known=tokenizer is not None,
        )
        self._output_checker = FormChecker(folder, vocabulary_size=self.facts.vocabulary_size)
        self.base_version = 0
        """Version of tokens sampled without an adapter."""
        self._runs: dict[str, Run] = {}
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._cache_epoch = self._cached_tokens = 0
        self._is_paused, self._sleep_level = False, 0

    @property
    def load(self) -> VllmLoad:
        """Current load of the engine."""
        count = sum(run.open_sequences for run in self._runs.values())
        running = min(count, self.facts.max_sequences)
        stats, usage = self._core.stats, self._core.stats.kv_usage
        return VllmLoad(
            running_sequences=running,
            waiting_sequences=count - running,
            # vLLM reports statistics with each step, and there is no step after the last request.
            kv_usage=sum(usage.values()) / len(usage) if count and usage else 0.0,
            tokens_per_second=stats.tokens_per_second,
            prefix_hit_rate=stats.prefix_hit_rate,
            is_paused=self._is_paused,
            is_sleeping=self._sleep_level > 0,
        )

    @property
    def can_sleep(self) -> bool:
        """Whether the engine can release its memory: on an accelerator, with the argument `enable_sleep_mode`."""
        return bool(self._core.args.enable_sleep_mode) and not is_cpu()

    async def generate(self, request: VllmRequest) -> AsyncGenerator[EngineEvent, None]:
        """Run a request; yield the prompt's event (unless the request is continued), the tokens and the ends.

        Closing the generator aborts the request. A slow consumer does not delay other requests: its backlog is bounded
        by the number of tokens of the request.

        Raises:
            DuplicateRequest: a request with this id is running.
            InvalidPrompt, ContextExceeded, InvalidSamplingParams, InvalidContinuation: the request was refused.
            UnknownAdapter: the engine does not have the version.
            EngineFailed: the engine has failed, or the structured output could not be checked.
        """
        await self._is_open.wait()
        run = self._begin(request)
        try:
            if request.params.structured_output is not None:
                run.constraint = await self._output_checker.check(request.params.structured_output)
            with self._core.watching():
                async with aclosing(self._events(run)) as events:
                    async for event in events:
                        yield event
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed('the vLLM engine has failed; start another engine') from error
        except VLLMClientError as error:
            field = 'structured_output' if request.params.structured_output else 'params'
            raise InvalidSamplingParams(field, 'vLLM does not support this value; change it') from error
        finally:
            del self._runs[request.request_id]
            self._cached_tokens += run.computed_tokens
            if request.adapter is not None:
                await asyncio.shield(self._adapters.release(request.adapter))

    async def check_form(self, form: StructuredOutput, *, owner: str = '') -> None:
        """Check that an output specification can be compiled. A later `generate` reuses the cached result.

        Args:
            form: specification of the output.
            owner: owner of the request. Owners take turns, so many checks of one owner do not delay other owners.

        Raises:
            InvalidSamplingParams: the specification is malformed, has features that are not supported, or cannot be
                compiled within the limits.
            EngineFailed: the process that compiles specifications exited or did not respond.
        """
        await self._output_checker.check(form, owner=owner)

    async def abort(self, request_id: str) -> None:
        """Cancel a request: its sequences end with `StopReason.ABORT`. Unknown ids are ignored."""
        run = self._runs.get(request_id)
        if run is not None:
            run.is_aborted = True
            sequence_ids = [item.engine_id for item in run.sequences if not item.is_ended]
            await self._core.abort([*sequence_ids, *run.probe_ids])

    async def add_adapter(self, key: str, version: int, source: AdapterSource) -> VllmAdapter:
        """Load an adapter version from memory. Running requests continue.

        Raises:
            AdapterDoesNotFit: the version does not fit the model, and is not loaded.
            EngineFailed: the engine has failed.
        """
        return await self._adapters.add(key, version, source)

    async def remove_adapter(self, adapter: VllmAdapter) -> None:
        """Remove a version, immediately or after its last request. Unknown versions are ignored."""
        await self._adapters.remove(adapter)

    async def replace_base(self, tensors: Mapping[str, TensorData], *, version: int = 0) -> None:
        """Replace the base weights. Adapters are kept, cached prefixes are discarded, and new requests wait.

        Args:
            tensors: all tensors of the checkpoint, by name. A tied head may be omitted.
            version: version of tokens sampled from the new base model.

        Raises:
            SamplerBusy: requests or another replacement are running; nothing was changed.
            BaseDoesNotFit: the weights do not fit the model. The previous weights stay in use.
            EngineFailed: the replacement failed, and the state of the engine is undefined; or the engine had failed.
        """
        if self._runs or not self._is_open.is_set():
            raise SamplerBusy
        problem = problem_with(self._folder, tensors)
        if problem:
            raise BaseDoesNotFit(problem)
        # A cancelled caller must not interrupt the replacement.
        await asyncio.shield(self._replace(tensors, version))

    async def pause(self) -> None:
        """Pause between two steps. Requests wait and keep their memory."""
        await self._core.pause()
        self._is_paused = True

    async def resume(self) -> None:
        """Resume after `pause`."""
        await self._core.resume()
        self._is_paused = False

    async def sleep(self, level: int) -> None:
        """Release the accelerator's memory. Running requests are aborted, and cached prefixes are discarded.

        Args:
            level: 1 keeps the weights in host memory, 2 discards them.

        Raises:
            SleepUnavailable: the engine runs on a CPU, `enable_sleep_mode` is not set, or level 2 would discard weights
                that were replaced from memory.
            EngineFailed: the engine has failed.
        """
        if not self.can_sleep:
            raise SleepUnavailable('sleeping requires an accelerator and the engine argument enable_sleep_mode')
        if level > 1 and self.base_version:
            raise SleepUnavailable('the base weights were replaced from memory and would be lost; use level 1')
        await self._core.sleep(level)
        self._cache_epoch += 1
        self._sleep_level = level

    async def wake_up(self) -> None:
        """Allocate the memory again. Has no effect if the engine is not asleep.

        Raises:
            EngineFailed: the engine has failed, or the weights could not be restored after level 2.
        """
        level, self._sleep_level = self._sleep_level, 0
        if level:
            await self._core.wake_up()
        if level > 1:
            # vLLM allocates memory for the weights but does not load them.
            problems = await self._core.call_workers('twinkle_restore')
            if any(problems):
                self._core.fail()
                raise EngineFailed(next(filter(None, problems)))

    async def reset_prefix_cache(self) -> int:
        """Discard cached prefixes, including prefixes that running requests keep in memory.

        Returns:
            Number of tokens of the requests that ended since the last call: an estimate of the discarded tokens.
        """
        # vLLM frees nothing while a request runs, but a new salt prevents matches with old prefixes.
        self._cache_epoch += 1
        count, self._cached_tokens = self._cached_tokens, 0
        await self._core.reset_prefix_cache()
        return count

    async def device_memory(self) -> dict[str, int]:
        """Return the bytes of the GPUs' memory by state, added over the workers; empty on a CPU."""
        return summed(await self._core.call_workers('twinkle_device_memory'))

    async def wait_until_failed(self) -> None:
        """Wait until the engine fails permanently."""
        await self._core.wait_until_failed()

    async def close(self) -> None:
        """Stop the engine and all requests; return when its processes have exited."""
        await self._output_checker.close()
        await self._core.close()

    async def _replace(self, tensors: Mapping[str, TensorData], version: int) -> None:
        self._is_open.clear()
        is_done = False
        try:
            with in_memory_file(tensors) as path:
                problems = await self._core.call_workers('twinkle_replace_base', path, layout_of(tensors))
            if any(problems):
                raise EngineFailed(next(filter(None, problems)))
            self.base_version = version
            await self.reset_prefix_cache()
            is_done = True
        finally:
            if not is_done:
                self._core.fail()
            self._is_open.set()

    def _begin(self, request: VllmRequest) -> Run:
        """Check a request and reserve its id and adapter, without awaiting."""
        self._core.check()
        if request.request_id in self._runs:
            raise DuplicateRequest(request.request_id)
        # Structured output is checked later, when the request can already be aborted.
        params = replace(request.params, structured_output=None)
        max_new_tokens = self.admission.check(request.prompt_token_ids, params)
        rules = StopRules.of(params, eos_token_ids=self.facts.eos_token_ids, max_new_tokens=max_new_tokens)
        run = Run(request, rules, self._sequences(request, rules))
        if request.adapter is not None:
            self._adapters.acquire(request.adapter)
        self._runs[request.request_id] = run
        return run

    def _sequences(self, request: VllmRequest, rules: StopRules) -> list[Sequence]:
        version = request.adapter.version if request.adapter else self.base_version

        def new_detector() -> StopDetector:
            return StopDetector(rules, IncrementalDetokenizer(self._tokenizer) if self._tokenizer else None)

        if request.continued:
            check_continued(
                request.continued,
                request.params,
                vocab_size=self.facts.vocabulary_size,
                max_new_tokens=rules.max_tokens,
            )
            started = replay(request.continued, new_detector)
        else:
            started = {index: Replay((), new_detector(), None) for index in range(request.params.num_samples)}
        return [
            Sequence(
                request.request_id,
                index,
                version,
                state.stop_detector,
                state.tokens,
                state.reason,
                request.params.logprobs or 0,
                is_structured=request.params.structured_output is not None,
            )
            for index, state in started.items()
        ]

    async def _events(self, run: Run) -> AsyncGenerator[EngineEvent, None]:
        """Yield the events of a request: first the prompt's event, unless the request is continued."""
        for sequence in run.sequences:
            if sequence.reason is not None:
                yield sequence.end(sequence.reason)
        is_scored_only = run.rules.max_tokens == 0
        open_sequences = [item for item in run.sequences if not item.is_ended]
        streams = [self._stream(run, item) for item in (open_sequences[:1] if is_scored_only else open_sequences)]
        delayed: list[TokenEvent] | None = None if run.request.continued else []
        async with aclosing(merged(streams)) as outputs:
            async for sequence, output in outputs:
                event = None if is_scored_only else sequence.add(output)
                if delayed is not None:
                    if sequence.index:
                        delayed += [event] if event else []
                        continue
                    probe = await probe_prompt(run, partial(self._outputs, run.request), self._core.call_workers)
                    yield prompt_event(run, output, probe)
                    for earlier in delayed:
                        yield earlier
                    delayed = None
                if event is not None:
                    yield event
        for sequence in run.sequences:
            if not sequence.is_ended:
                yield sequence.end(StopReason.ABORT if run.is_aborted else StopReason.LENGTH)

    async def _stream(self, run: Run, sequence: Sequence) -> AsyncGenerator[tuple[Sequence, Any], None]:
        """Yield vLLM's outputs of one sequence until a stop rule ends it. Closing the generator aborts the sequence."""
        if run.is_aborted:
            return
        params = vllm_params(
            run.request.params,
            run.rules,
            sequence_index=sequence.index,
            sampled_ids=sequence.sampled_ids,
            form=run.constraint,
            prompt_key='' if sequence.index or run.request.continued else sequence.engine_id,
        )
        token_ids = [*run.request.prompt_token_ids, *sequence.sampled_ids]
        async with aclosing(self._outputs(run.request, sequence.engine_id, token_ids, params)) as outputs:
            async for output in outputs:
                yield sequence, output
                if sequence.is_ended:
                    return

    def _outputs(
        self, request: VllmRequest, engine_id: str, token_ids: list[int], params: VllmParams
    ) -> AsyncGenerator[Any, None]:
        """Return vLLM's outputs of one sequence with the adapter and the cached prefixes of a request."""
        lora = self._adapters.request_of(request.adapter)
        salt = f'{self._cache_epoch}/{request.cache_salt}'
        return self._core.generate(engine_id, token_ids, params, lora=lora, salt=salt)
