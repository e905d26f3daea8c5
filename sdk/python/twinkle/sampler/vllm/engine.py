"""vLLM behind our events: many requests at once, each with its own adapter version.

vLLM draws; text, stop strings and ends are ours, the same as in the torch engine, so that a sequence
one engine began goes on in the other as if nothing had been.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from twinkle.data_format import StopReason, StructuredOutput, TensorData
from twinkle.sampler.engine.admission import Admission
from twinkle.sampler.engine.continuation import Replay, check_continued, replay
from twinkle.sampler.engine.detokenize import IncrementalDetokenizer, TokenDecoder
from twinkle.sampler.engine.request import EngineEvent, TokenEvent
from twinkle.sampler.engine.stopping import StopRules, StopWatch
from twinkle.sampler.errors import (
    BaseDoesNotFit,
    DuplicateRequest,
    EngineFailed,
    InvalidSamplingParams,
    SamplerBusy,
    SleepUnavailable,
)
from twinkle.sampler.vllm.adapter_table import AdapterTable
from twinkle.sampler.vllm.adapters import VllmAdapter
from twinkle.sampler.vllm.base_weights import problem_with
from twinkle.sampler.vllm.core import VllmCore
from twinkle.sampler.vllm.form_check import FormChecker
from twinkle.sampler.vllm.handover import AdapterSource, in_memory_file, layout_of
from twinkle.sampler.vllm.heartbeat import HANG_SECONDS
from twinkle.sampler.vllm.merge import merged
from twinkle.sampler.vllm.model_facts import ModelFacts
from twinkle.sampler.vllm.options import is_cpu
from twinkle.sampler.vllm.request import Run, Sequence, VllmRequest, prompt_event
from twinkle.sampler.vllm.sampling import vllm_params


@dataclass(frozen=True, kw_only=True)
class VllmLoad:
    """How busy an engine is."""

    running_sequences: int
    waiting_sequences: int
    kv_usage: float
    """Share of the key-value memory in use, 0 to 1."""
    tokens_per_second: float
    prefix_hit_rate: float
    is_paused: bool
    is_sleeping: bool


class VllmEngine:
    """Continues prompts on a shared base model, each with its own adapter version.

    Concurrency: made in any thread; used on one event loop, by any number of tasks.
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
        """Start vLLM on a model folder; takes many seconds and blocks.

        Args:
            folder: the model in the layout of the hub.
            args: engine arguments as vLLM names them.
            tokenizer: gives the text of tokens. Unset: events have no text and stop strings are refused.
            thread_count: CPU threads of the engine core, on a CPU.
            hang_seconds: how long the engine core may give no sign of life before it is ended. One that is seen to
                compute on a CPU, or that loads weights, may take ten times as long.

        Raises:
            ValueError: an argument is unknown, or vLLM would compute in another dtype than asked for.
        """
        self._folder = folder
        self._tokenizer = tokenizer
        self._core = VllmCore(folder, args or {}, thread_count=thread_count, hang_seconds=hang_seconds)
        self._adapters = AdapterTable(self._core)
        self.facts: ModelFacts = self._core.facts
        self.admission = Admission(
            vocab_size=self.facts.vocabulary_size,
            context_tokens=self.facts.context_tokens,
            is_text_known=tokenizer is not None,
        )
        self._forms = FormChecker(folder, vocabulary_size=self.facts.vocabulary_size)
        self.base_version = 0
        """What drew the tokens of requests without an adapter."""
        self._runs: dict[str, Run] = {}
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._cache_epoch = 0
        self._cached_tokens = 0
        self._is_paused = False
        self._sleep_level = 0

    @property
    def load(self) -> VllmLoad:
        """How busy the engine is now."""
        count = sum(run.open_sequences for run in self._runs.values())
        running = min(count, self.facts.max_sequences)
        stats, usage = self._core.stats, self._core.stats.kv_usage
        return VllmLoad(
            running_sequences=running,
            waiting_sequences=count - running,
            # vLLM tells of every step, and there is none after the last request.
            kv_usage=sum(usage.values()) / len(usage) if count and usage else 0.0,
            tokens_per_second=stats.tokens_per_second,
            prefix_hit_rate=stats.prefix_hit_rate,
            is_paused=self._is_paused,
            is_sleeping=self._sleep_level > 0,
        )

    @property
    def can_sleep(self) -> bool:
        """Whether it can give memory back: on a CPU vLLM only says so."""
        return bool(self._core.args.enable_sleep_mode) and not is_cpu()

    async def generate(self, request: VllmRequest) -> AsyncGenerator[EngineEvent, None]:
        """Run a request and yield what it brings: the prompt once, tokens, one end for each sequence.

        Closing the generator ends the request. A reader that is slow holds nothing back: what waits for it
        is bounded by the request's own tokens.

        Raises:
            DuplicateRequest: a request of that id is running.
            InvalidPrompt, ContextExceeded, InvalidSamplingParams, InvalidContinuation: nothing was done.
            UnknownAdapter: this engine does not have the version.
            EngineFailed: the engine is broken.
        """
        await self._is_open.wait()
        run = self._begin(request)
        try:
            if request.params.structured_output is not None:
                run.form = await self._forms.check(request.params.structured_output)
            with self._core.watching():
                async with aclosing(self._events(run)) as events:
                    async for event in events:
                        yield event
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed('the vLLM engine is broken; start another') from error
        except VLLMClientError as error:
            field = 'structured_output' if request.params.structured_output else 'params'
            raise InvalidSamplingParams(field, 'vLLM cannot honour it') from error
        finally:
            del self._runs[request.request_id]
            self._cached_tokens += run.computed_tokens
            if request.adapter is not None:
                await asyncio.shield(self._adapters.release(request.adapter))

    async def check_form(self, form: StructuredOutput, *, owner: str = '') -> None:
        """Find out whether outputs can have a form; `generate` does too, but asks a second time for nothing.

        Args:
            form: as the caller gave it.
            owner: whose it is. Owners take turns: one with many forms holds up nobody but itself.

        Raises:
            InvalidSamplingParams: it cannot be compiled, or not within the limits.
            EngineFailed: it could not be found out.
        """
        await self._forms.check(form, owner=owner)

    async def abort(self, request_id: str) -> None:
        """End a request: its sequences end with `StopReason.ABORT`. Unknown requests are no error."""
        run = self._runs.get(request_id)
        if run is not None:
            run.is_aborted = True
            await self._core.abort([item.engine_id for item in run.sequences if not item.is_ended])

    async def add_adapter(self, key: str, version: int, source: AdapterSource) -> VllmAdapter:
        """Make a version usable, from memory; running requests go on between two steps.

        Raises:
            AdapterDoesNotFit: nothing of it stays.
            EngineFailed: the engine is broken.
        """
        return await self._adapters.add(key, version, source)

    async def remove_adapter(self, adapter: VllmAdapter) -> None:
        """Forget a version: at once, or when its last request has ended. Unknown ones are no error."""
        await self._adapters.remove(adapter)

    async def replace_base(self, tensors: Mapping[str, TensorData], *, version: int = 0) -> None:
        """Replace the base model's weights; adapters stay, cached prefixes are forgotten, requests wait.

        Args:
            tensors: every tensor of the checkpoint, by its names there. A tied head may be left out.
            version: what the spans of the base model's tokens say from now on.

        Raises:
            SamplerBusy: requests run; nothing was done.
            BaseDoesNotFit: the old weights go on serving.
            EngineFailed: the engine broke, so that what it holds is unknown.
        """
        if self._runs or not self._is_open.is_set():
            raise SamplerBusy
        problem = problem_with(self._folder, tensors)
        if problem:
            raise BaseDoesNotFit(problem)
        # A caller that leaves in the middle must not leave half of it behind.
        await asyncio.shield(self._replace(tensors, version))

    async def pause(self) -> None:
        """Stop between two steps; requests wait and keep their memory."""
        await self._core.pause()
        self._is_paused = True

    async def resume(self) -> None:
        """Go on."""
        await self._core.resume()
        self._is_paused = False

    async def sleep(self, level: int) -> None:
        """Give back the accelerator's memory; cached prefixes are forgotten.

        Args:
            level: 1 keeps the weights in the host's memory, 2 drops them.

        Raises:
            SleepUnavailable: on a CPU, or `enable_sleep_mode` was not set.
        """
        if not self.can_sleep:
            raise SleepUnavailable('vLLM sleeps on an accelerator only, and where enable_sleep_mode was set')
        if level > 1 and self.base_version:
            raise SleepUnavailable('the base model was replaced from memory, and its weights would be lost')
        await self._core.sleep(level)
        self._cache_epoch += 1
        self._sleep_level = level

    async def wake_up(self) -> None:
        """Take the memory again. An engine that does not sleep is no error."""
        level, self._sleep_level = self._sleep_level, 0
        if level:
            await self._core.wake_up()
        if level > 1:
            # vLLM comes back with room for weights and none in it.
            problems = await self._core.everywhere('twinkle_restore')
            if any(problems):
                self._core.fail()
                raise EngineFailed(next(filter(None, problems)))

    async def reset_prefix_cache(self) -> int:
        """Forget cached prefixes, also those that running requests keep in memory.

        Returns:
            Tokens that ended requests left in the cache since the last time; some may have made room since.
        """
        # vLLM frees nothing while a request runs; another salt makes sure that nothing old is found even so.
        self._cache_epoch += 1
        count, self._cached_tokens = self._cached_tokens, 0
        await self._core.reset_prefix_cache()
        return count

    async def wait_until_failed(self) -> None:
        """Return once the engine is broken for good; else never."""
        await self._core.wait_until_failed()

    async def close(self) -> None:
        """End the engine and every request; returns when its processes have ended."""
        await self._forms.close()
        await self._core.close()

    async def _replace(self, tensors: Mapping[str, TensorData], version: int) -> None:
        self._is_open.clear()
        is_done = False
        try:
            with in_memory_file(tensors) as path:
                problems = await self._core.everywhere('twinkle_replace_base', path, layout_of(tensors))
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
        """Check a request and take its id and adapter; nothing is awaited here."""
        self._core.check()
        if request.request_id in self._runs:
            raise DuplicateRequest(request.request_id)
        # The form of the output is checked once this request can be aborted.
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

        def new_watch() -> StopWatch:
            return StopWatch(rules, IncrementalDetokenizer(self._tokenizer) if self._tokenizer else None)

        if request.continued:
            check_continued(
                request.continued,
                request.params,
                vocab_size=self.facts.vocabulary_size,
                max_new_tokens=rules.max_tokens,
            )
            begun = replay(request.continued, new_watch)
        else:
            begun = {index: Replay((), new_watch(), None) for index in range(request.params.num_samples)}
        top_count = request.params.logprobs or 0
        return [
            Sequence(
                request.request_id,
                index,
                version,
                so_far.stop_watch,
                so_far.tokens,
                so_far.reason,
                top_count,
                has_form=request.params.structured_output is not None,
            )
            for index, so_far in begun.items()
        ]

    async def _events(self, run: Run) -> AsyncGenerator[EngineEvent, None]:
        """Yield the events of a request; the prompt's comes before all others."""
        for sequence in run.sequences:
            if sequence.reason is not None:
                yield sequence.end(sequence.reason)
        is_scored_only = run.rules.max_tokens == 0
        open_sequences = [item for item in run.sequences if not item.is_ended]
        streams = [self._stream(run, item) for item in (open_sequences[:1] if is_scored_only else open_sequences)]
        held: list[TokenEvent] | None = None if run.request.continued else []
        async with aclosing(merged(streams)) as outputs:
            async for sequence, output in outputs:
                event = None if is_scored_only else sequence.take(output)
                if held is not None:
                    if sequence.index:
                        held += [event] if event else []
                        continue
                    yield prompt_event(run.request, output)
                    for earlier in held:
                        yield earlier
                    held = None
                if event is not None:
                    yield event
        for sequence in run.sequences:
            if not sequence.is_ended:
                yield sequence.end(StopReason.ABORT if run.is_aborted else StopReason.LENGTH)

    async def _stream(self, run: Run, sequence: Sequence) -> AsyncGenerator[tuple[Sequence, Any], None]:
        """Yield vLLM's news of one sequence until it has ended for us; closing it ends it in vLLM."""
        if run.is_aborted:
            return
        request = run.request
        outputs = self._core.generate(
            sequence.engine_id,
            [*request.prompt_token_ids, *sequence.drawn],
            vllm_params(request.params, run.rules, sequence_index=sequence.index, drawn=sequence.drawn, form=run.form),
            lora=self._adapters.request_of(request.adapter),
            salt=f'{self._cache_epoch}/{request.cache_salt}',
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield sequence, output
                if sequence.is_ended:
                    return
