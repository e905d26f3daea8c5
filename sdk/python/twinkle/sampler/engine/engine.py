"""The torch sampling engine: it accepts requests and returns events, one step at a time.

The engine is synchronous and belongs to one thread. `scheduler.py` decides what a step computes, `pack.py` arranges
the rows, `twinkle.nn` computes them, `token_sampling.py` samples tokens and `stopping.py` ends sequences. Legend:
T rows of a step, R some of these rows, D hidden size, V vocabulary size.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as TokenIds

import torch
from torch import Tensor

from twinkle.data_format import SamplingParams, StopReason
from twinkle.nn import KVCache, PackedCausalLM, log_probabilities
from twinkle.sampler.engine.admission import Admission
from twinkle.sampler.engine.config import EngineConfig
from twinkle.sampler.engine.continuation import Replay, check_continued, replay
from twinkle.sampler.engine.detokenize import IncrementalDetokenizer, TokenDecoder
from twinkle.sampler.engine.events import aborted_event, last_event, version_spans
from twinkle.sampler.engine.pack import adapter_spans, items_of, pack
from twinkle.sampler.engine.prompt_scores import PromptScores
from twinkle.sampler.engine.request import (
    EngineAdapter,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    PromptMedia,
    SequenceSoFar,
    TokenEvent,
)
from twinkle.sampler.engine.routed_experts import experts_of, record, recording_of
from twinkle.sampler.engine.scheduler import PrefillChunk, Scheduler, SchedulerLimits, StepPlan
from twinkle.sampler.engine.sequence import SampleGroup, Sequence
from twinkle.sampler.engine.stopping import StopDetector, StopRules
from twinkle.sampler.engine.token_sampling import sample_token, top_logprobs, uniform
from twinkle.sampler.errors import DuplicateRequest, UnknownRequest

SCORED_ROWS = 64
"""Number of prompt rows whose logits are computed together; 37 MiB in float32 for a vocabulary of 150k tokens."""


class SamplerEngine:
    """Samples completions on a shared base model, each request with its own adapter version.

    Args:
        model: the frozen base model; not modified.
        tokenizer: converts tokens to text. None: events have no text, and stop strings are refused.
        config: limits of the engine.
        new_seed: returns seeds for requests without a seed. None: random seeds of the operating system.

    Raises:
        ValueError: a limit is too small. The message names the limit and its minimum.

    Concurrency: not thread-safe; call all methods from the thread that calls `step`.
    """

    def __init__(
        self,
        model: PackedCausalLM,
        *,
        tokenizer: TokenDecoder | None = None,
        config: EngineConfig | None = None,
        new_seed: Callable[[], int] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._model = model
        self._tokenizer = tokenizer
        self._new_seed = new_seed or (lambda: random.SystemRandom().getrandbits(63))
        context = min(self.config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
        memory_bytes = self.config.kv_cache_memory_bytes
        if memory_bytes < (needed := model.cache_size.of(1)):
            raise ValueError(f'kv_cache_memory_bytes must be at least {needed} for one token, got {memory_bytes}')
        self.admission = Admission(
            vocab_size=model.vocab_size,
            context_tokens=model.cache_size.longest(memory_bytes, limit=context),
            is_text_known=tokenizer is not None,
            is_routing_known=model.routing is not None,
        )
        self._scheduler = Scheduler(
            SchedulerLimits(
                max_sequences=self.config.max_sequences,
                max_step_rows=self.config.max_batch_tokens,
                prefill_chunk_rows=self.config.prefill_chunk_tokens,
                cache_budget_bytes=memory_bytes,
            )
        )
        self._unfinished: dict[str, int] = {}
        self._pending_events: list[EngineEvent] = []
        self.last_step_rows = 0
        """Number of rows in the last step. 0: a step has no effect until requests are added, resumed or aborted."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running, and no event is pending."""
        return not self._unfinished and not self._pending_events

    def is_running(self, request_id: str) -> bool:
        """Return whether a request is waiting or running."""
        return request_id in self._unfinished

    @property
    def load(self) -> EngineLoad:
        """Current load of the engine."""
        scheduler = self._scheduler
        pending = [*scheduler.waiting, *scheduler.prefilling]
        return EngineLoad(
            running_sequences=len(scheduler.running),
            waiting_sequences=sum(len(group.sample_indices) for group in pending),
            cache_bytes_reserved=scheduler.cache_bytes_reserved,
            cache_bytes_budget=scheduler.limits.cache_budget_bytes,
        )

    @property
    def cache_bytes_allocated(self) -> int:
        """Current size of all caches in bytes; at most the configured size."""
        prompts = [group.cache for group in self._scheduler.prefilling]
        return sum(cache.size_bytes for cache in [*prompts, *(item.cache for item in self._scheduler.running)])

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: TokenIds[int],
        params: SamplingParams,
        *,
        adapter: EngineAdapter | None = None,
        media: PromptMedia | None = None,
        continued: TokenIds[SequenceSoFar] = (),
    ) -> None:
        """Add a request to the queue.

        Args:
            request_id: unique among running requests.
            prompt_token_ids: tokens of the prompt, at least one.
            params: sampling parameters.
            adapter: adapter version. None: the base model.
            media: images, videos and audio of the prompt, for a model that supports them.
            continued: for a request that another engine started, one entry per sequence. The engine then returns
                exactly the events that would have followed the given tokens. Empty: a new request.

        Raises:
            DuplicateRequest: a request with this id is running.
            InvalidPrompt: the prompt is empty or contains a token outside the vocabulary.
            ContextExceeded: prompt and new tokens exceed the context length.
            InvalidSamplingParams: a parameter is not valid for this engine.
            InvalidContinuation: `continued` cannot be the start of this request.
            NotSupportedByEngine: `structured_output` is set.
        """
        if request_id in self._unfinished:
            raise DuplicateRequest(request_id)
        prompt = tuple(int(token_id) for token_id in prompt_token_ids)
        max_new_tokens = self.admission.check(prompt, params)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            adapter=adapter,
            media=media,
            is_continued=bool(continued),
        )
        replays = self._replays(request, continued, max_new_tokens) if continued else None
        groups = self._groups(request, max_new_tokens, replays)
        if groups:
            self._unfinished[request_id] = sum(len(group.sample_indices) for group in groups)
        for group in groups:
            self._scheduler.add(group)

    def abort(self, request_id: str) -> list[EngineEvent]:
        """End a request immediately and free its memory.

        Returns:
            The last event of each unfinished sequence.

        Raises:
            UnknownRequest: no request with this id is running.
        """
        if request_id not in self._unfinished:
            raise UnknownRequest(request_id)
        ended: list[EngineEvent] = []
        for group in self._groups_of(request_id, [*self._scheduler.waiting, *self._scheduler.prefilling]):
            self._scheduler.remove_group(group)
            ended += [aborted_event(group, index) for index in group.sample_indices]
        for sequence in [item for item in self._scheduler.running if item.group.request.request_id == request_id]:
            self._scheduler.finish(sequence)
            text = sequence.stop_detector.release()
            count = len(sequence.tokens)
            ended.append(
                last_event(sequence.group.request, sequence.index, StopReason.ABORT, token_count=count, text=text)
            )
        del self._unfinished[request_id]
        return ended

    def set_parked(self, request_id: str, *, is_parked: bool) -> None:
        """Pause or resume a request. Its sequences keep their memory; those not yet started sample one token first.

        Raises:
            UnknownRequest: no request with this id is running.
        """
        if request_id not in self._unfinished:
            raise UnknownRequest(request_id)
        running = [sequence.group for sequence in self._scheduler.running]
        groups = [*self._scheduler.waiting, *self._scheduler.prefilling, *running]
        for group in self._groups_of(request_id, groups):
            group.is_parked = is_parked

    @torch.inference_mode()
    def step(self) -> list[EngineEvent]:
        """Compute one batch and return its events. There may be none while prompts are being computed.

        After an error, the state of the requests in the batch is undefined; abort them.
        """
        events, self._pending_events = self._pending_events, []
        plan = self._scheduler.schedule()
        self.last_step_rows = plan.row_count
        if plan.row_count == 0:
            return events
        hidden_TD, item_rows = self._forward(plan)
        events += self._ended([chunk.sequence for chunk in plan.replays])
        prefill_rows = item_rows[len(plan.decodes) + len(plan.replays) :]
        for chunk, rows in zip(plan.prefills, prefill_rows, strict=True):
            self._record_prompt_rows(chunk, hidden_TD[rows.start : rows.stop])
        computed = [
            (chunk.group, rows.stop - 1)
            for chunk, rows in zip(plan.prefills, prefill_rows, strict=True)
            if chunk.group.is_prompt_computed
        ]
        last_rows = [rows.start for rows in item_rows[: len(plan.decodes)]] + [row for _, row in computed]
        if not last_rows:
            return events
        sampled_groups = [*(sequence.group for sequence in plan.decodes), *(group for group, _ in computed)]
        owners = [(group.request.adapter, range(row, row + 1)) for row, group in enumerate(sampled_groups)]
        logits_RV = self._model.logits(hidden_TD[last_rows], adapters=adapter_spans(owners))
        events += [self._extend(sequence, logits_RV[row]) for row, sequence in enumerate(plan.decodes)]
        for row, (group, _) in enumerate(computed, start=len(plan.decodes)):
            events += self._start(group, logits_RV[row])
        return events

    def _replays(
        self, request: EngineRequest, continued: TokenIds[SequenceSoFar], max_new_tokens: int
    ) -> dict[int, Replay]:
        """Return the unfinished sequences to compute: sequences without a stop reason, or all if experts are requested.

        The next step reports the end of the sequences that are not computed.
        """
        check_continued(continued, request.params, vocab_size=self._model.vocab_size, max_new_tokens=max_new_tokens)
        rules = self._stop_rules(request, max_new_tokens)
        replays = replay(continued, lambda: self._stop_detector(rules))
        if request.params.return_routed_experts:
            return replays
        self._pending_events += [
            last_event(request, index, item.reason, token_count=len(item.tokens))
            for index, item in replays.items()
            if item.reason is not None
        ]
        return {index: item for index, item in replays.items() if item.reason is None}

    def _groups(
        self, request: EngineRequest, max_new_tokens: int, replays: dict[int, Replay] | None
    ) -> list[SampleGroup]:
        """Return the samples as one group, or as several groups if the scheduler cannot admit all samples together."""
        params = request.params
        samples = list(range(params.num_samples) if replays is None else replays)
        size = max(len(samples), 1)
        cache_bytes = self._model.cache_size.of(len(request.prompt_token_ids) + max_new_tokens)
        if max_new_tokens:
            size = self._scheduler.largest_group(cache_bytes)
        seed = self._new_seed() if params.seed is None else params.seed
        return [
            SampleGroup(
                request=request,
                sample_indices=samples[begin : begin + size],
                max_new_tokens=max_new_tokens,
                scores=None if begin or request.is_continued else PromptScores(request, seed=seed),
                replays=replays or {},
                seed=seed,
                cache_bytes_per_sample=cache_bytes,
                cache=KVCache(len(request.prompt_token_ids) + max_new_tokens),
            )
            for begin in range(0, len(samples), size)
        ]

    def _groups_of(self, request_id: str, groups: list[SampleGroup]) -> list[SampleGroup]:
        return [group for group in groups if group.request.request_id == request_id]

    def _forward(self, plan: StepPlan) -> tuple[Tensor, list[range]]:
        """Return the hidden states of all rows, and the rows of each decode, replay and prompt chunk."""
        items = items_of(plan)
        packed = pack(items, device=self._model.device)
        routing = None if self._model.routing is None else recording_of(items, self._model.routing)
        hidden_TD = self._model.hidden(
            packed.input_ids,
            packed.position_ids,
            sequences=packed.sequences,
            adapters=packed.adapters,
            media=packed.media,
            routing=routing,
        )
        if routing is not None:
            record(items, packed.item_rows, routing)
        return hidden_TD, packed.item_rows

    def _record_prompt_rows(self, chunk: PrefillChunk, hidden_RD: Tensor) -> None:
        """Record that a chunk is in the cache, and score the prompt tokens that its rows predict."""
        group = chunk.group
        group.computed_tokens = chunk.end
        if group.scores is None:
            return
        rows = group.scores.rows_among(chunk.begin, chunk.end)
        for begin in range(0, len(rows), SCORED_ROWS):
            scored = rows[begin : begin + SCORED_ROWS]
            owner = [(group.request.adapter, range(len(scored)))]
            rows_RD = hidden_RD[[row - chunk.begin for row in scored]]
            group.scores.record(scored, self._model.logits(rows_RD, adapters=adapter_spans(owner)))
        if group.is_prompt_computed:
            group.scores.record_last(hidden_RD[-1])

    def _start(self, group: SampleGroup, logits_V: Tensor) -> list[EngineEvent]:
        """Report a computed prompt, and sample the first token of each sequence that has none."""
        request = group.request
        events: list[EngineEvent] = [group.scores.event] if group.scores else []
        if group.max_new_tokens == 0:
            self._scheduler.start(group, [])
            del self._unfinished[request.request_id]
            experts = experts_of(group)
            return events + [
                last_event(request, index, StopReason.LENGTH, experts=experts) for index in group.sample_indices
            ]
        rules = self._stop_rules(request, group.max_new_tokens)
        sequences = [self._sequence(group, index, rules) for index in group.sample_indices]
        group.cache = None
        self._scheduler.start(group, sequences)
        events += [self._extend(sequence, logits_V) for sequence in sequences if not sequence.tokens]
        return events + self._ended(sequences)

    def _ended(self, sequences: list[Sequence]) -> list[EngineEvent]:
        """End the sequences that another engine has sampled to their end, once their earlier tokens are computed."""
        events: list[EngineEvent] = []
        for sequence in sequences:
            if sequence.end_reason is None or sequence.uncomputed_count > 1:
                continue
            self._close(sequence)
            request, count, experts = sequence.group.request, len(sequence.tokens), experts_of(sequence.group, sequence)
            events.append(last_event(request, sequence.index, sequence.end_reason, token_count=count, experts=experts))
        return events

    def _sequence(self, group: SampleGroup, index: int, rules: StopRules) -> Sequence:
        replay_state = group.replays.get(index)
        tokens = list(replay_state.tokens) if replay_state else []
        return Sequence(
            group=group,
            index=index,
            cache=group.cache if index == group.sample_indices[-1] else group.cache.copy(),
            rules=rules,
            stop_detector=replay_state.stop_detector if replay_state else self._stop_detector(rules),
            tokens=tokens,
            end_reason=replay_state.reason if replay_state else None,
            uncomputed_count=max(len(tokens), 1),
        )

    def _stop_rules(self, request: EngineRequest, max_new_tokens: int) -> StopRules:
        eos_token_ids = frozenset(self._model.eos_token_ids)
        return StopRules.of(request.params, eos_token_ids=eos_token_ids, max_new_tokens=max_new_tokens)

    def _stop_detector(self, rules: StopRules) -> StopDetector:
        return StopDetector(rules, IncrementalDetokenizer(self._tokenizer) if self._tokenizer else None)

    def _extend(self, sequence: Sequence, logits_V: Tensor) -> TokenEvent:
        """Sample the next token of a sequence and decide whether the sequence ends."""
        request, token_index = sequence.group.request, len(sequence.tokens)
        token_id = sample_token(
            logits_V,
            request.params,
            present=(*request.prompt_token_ids, *sequence.tokens),
            forbidden=sequence.rules.forbidden_tokens(token_index),
            number=uniform(sequence.group.seed, sequence.index, token_index),
            sampled_ids=sequence.tokens,
        )
        sequence.tokens.append(token_id)
        decision = sequence.stop_detector.push(token_id)
        if decision.reason:
            self._close(sequence)
        return TokenEvent(
            request_id=request.request_id,
            sequence_index=sequence.index,
            tokens=[token_id],
            logprobs=[top_logprobs(log_probabilities(logits_V[None])[0], token_id, request.params.logprobs or 0)],
            text=decision.text,
            version=request.version,
            stop_reason=decision.reason,
            version_spans=version_spans(request, len(sequence.tokens)) if decision.reason else [],
            routed_experts=experts_of(sequence.group, sequence) if decision.reason else None,
        )

    def _close(self, sequence: Sequence) -> None:
        request_id = sequence.group.request.request_id
        self._scheduler.finish(sequence)
        self._unfinished[request_id] -= 1
        if self._unfinished[request_id] == 0:
            del self._unfinished[request_id]
