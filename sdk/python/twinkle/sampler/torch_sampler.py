"""The sampler of this process: the torch engine behind the names users type."""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from twinkle.data_format import InputFeature, LoraConfig, SampleResponse, SamplingParams, Trajectory
from twinkle.hub import resolve_model
from twinkle.infra import DeviceMesh
from twinkle.infra.runtime import refuse_many_ranks
from twinkle.nn import LoraWeights, PackedCausalLM, load_adapter
from twinkle.sampler.base import Sampler, SamplerInput
from twinkle.sampler.engine import EngineAdapter, EngineConfig, EngineEvent, SamplerEngine, TokenEvent
from twinkle.sampler.errors import UnknownAdapter
from twinkle.sampler.inputs import prompt_feature, split_inputs
from twinkle.sampler.response import ResponseBuilder
from twinkle.template import Template, build_template

_ENGINE_ARGS = {
    'max_num_seqs': 'max_sequences',
    'max_num_batched_tokens': 'max_batch_tokens',
    'max_model_len': 'max_model_len',
    'kv_cache_memory_bytes': 'kv_cache_memory_bytes',
}
"""Engine arguments, as vLLM names them, to fields of `EngineConfig`."""
_MODEL_ARGS = ('dtype', 'device')


class TorchSampler(Sampler):
    """Samples in this process, on one device, with continuous batching.

    Greedy decoding gives, token for token, what transformers' `generate` gives.

    Concurrency: for one thread.
    """

    def __init__(
        self,
        model_id: str,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        model: PackedCausalLM | None = None,
    ) -> None:
        """Load a model.

        Args:
            model_id: hub id or folder.
            engine_args: 'dtype' and 'device' (float32 on the CPU), 'max_num_seqs',
                'max_num_batched_tokens', 'max_model_len', 'kv_cache_memory_bytes'.
            device_mesh: one rank; more are not supported yet.
            model: use this model, already loaded from `model_id`, such as a trainer's.

        Raises:
            ValueError: an engine argument is unknown or out of range.
            NotSupportedYet: the mesh has more than one rank.
            HubError: the model cannot be had.
        """
        refuse_many_ranks(device_mesh)
        args = dict(engine_args or {})
        unknown = sorted(set(args) - {*_ENGINE_ARGS, *_MODEL_ARGS})
        if unknown:
            known = [*_MODEL_ARGS, *_ENGINE_ARGS]
            raise ValueError(f'engine_args {unknown} have no effect on the torch engine; known are {known}')
        self.model_id = model_id
        self._template: Template | None = None
        model_args = {name: args[name] for name in _MODEL_ARGS if name in args}
        self._model = model or PackedCausalLM.load(resolve_model(model_id), **model_args)
        limits = {field: args[name] for name, field in _ENGINE_ARGS.items() if name in args}
        self._engine = SamplerEngine(self._model, tokenizer=self.template.tokenizer, config=EngineConfig(**limits))
        self._adapters: dict[str, EngineAdapter] = {}
        self._request_ids = itertools.count()
        self._inboxes: dict[str, deque[EngineEvent]] = {}

    @property
    def template(self) -> Template:
        """How chats become tokens; the model's own format unless `set_template` chose another."""
        if self._template is None:
            self._template = Template(self.model_id)
        return self._template

    def set_template(self, template_cls: str | type[Template] | Template, **options: Any) -> None:
        """Choose how chats become tokens.

        Args:
            template_cls: a name, class or instance.
            options: of the template; `model_id` is this sampler's unless given.

        Raises:
            UnknownTemplate: no template has that name.
        """
        if not isinstance(template_cls, Template):
            options.setdefault('model_id', self.model_id)
        self._template = build_template(template_cls, **options)

    def add_adapter_to_sampler(
        self, adapter_name: str, config_or_dir: LoraConfig | LoraWeights | str | PathLike[str]
    ) -> None:
        """Add an adapter, or replace it by a newer version; requests that run keep theirs.

        Args:
            adapter_name: how `sample` names it; not empty.
            config_or_dir: a peft folder, weights, or a configuration (ours or peft's) for fresh
                weights, which change nothing yet.

        Raises:
            ValueError: the name is empty, or the adapter does not fit the model.
            InvalidPeftFolder: the folder is no adapter.
        """
        if not adapter_name:
            raise ValueError('adapter_name is empty, which names the base model; give the adapter a name')
        weights = self._load(config_or_dir)
        known = self._adapters.get(adapter_name)
        self._adapters[adapter_name] = EngineAdapter(adapter_name, known.version + 1 if known else 1, weights)

    def sample(
        self,
        inputs: SamplerInput | Sequence[SamplerInput],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = '',
        *,
        num_samples: int | None = None,
    ) -> list[SampleResponse]:
        """Return the completions of each input, in order; see `Sampler.sample`."""
        params = _params(sampling_params, num_samples)
        adapter = self._adapter(adapter_name)
        features = [prompt_feature(item, self.encode_trajectory) for item in split_inputs(inputs)]
        prompts = [[int(token_id) for token_id in feature['input_ids']] for feature in features]
        for prompt in prompts:
            self._engine.admission.check(prompt, params)
        builders: dict[str, ResponseBuilder] = {}
        try:
            for feature, prompt in zip(features, prompts, strict=True):
                builders[self._add(prompt, params, adapter)] = ResponseBuilder(feature, params.num_samples)
            for request_id, builder in builders.items():
                for event in self._events(request_id):
                    builder.take(event)
        finally:
            for request_id in builders:
                self._end(request_id)
        return [builder.build(self.template) for builder in builders.values()]

    def sample_stream(
        self,
        inputs: SamplerInput,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = '',
        *,
        num_samples: int | None = None,
    ) -> Iterator[TokenEvent]:
        """Yield the tokens of one input as they are drawn; closing the iterator frees its memory.

        Raises:
            As `sample`, when the first event is asked for.
        """
        params = _params(sampling_params, num_samples)
        (item,) = split_inputs(inputs)
        feature = prompt_feature(item, self.encode_trajectory)
        request_id = self._add([int(token) for token in feature['input_ids']], params, self._adapter(adapter_name))
        try:
            yield from (event for event in self._events(request_id) if isinstance(event, TokenEvent))
        finally:
            self._end(request_id)

    def reset_prefix_cache(self) -> None:
        """Do nothing: this engine keeps no prefix beyond its request."""

    def encode_trajectory(self, trajectory: Trajectory, *, add_generation_prompt: bool = True) -> InputFeature:
        """Return a chat as tokens, by the template.

        Raises:
            InvalidTrajectory: names the field that is wrong.
        """
        return self.template.encode(trajectory, add_generation_prompt=add_generation_prompt)

    def decode_response(self, token_ids: Sequence[int]) -> str:
        """Return new tokens as text, special tokens left out."""
        return self.template.decode(token_ids, skip_special_tokens=True)

    def _load(self, source: LoraConfig | LoraWeights | str | PathLike[str]) -> LoraWeights:
        device = str(self._model.device)
        if isinstance(source, LoraWeights):
            return source
        if isinstance(source, str | PathLike):
            return load_adapter(source, self._model.layers, device=device)
        config = LoraConfig.of(source)
        return LoraWeights.create(self._model.layers, config, seed=config.seed or 0, device=device)

    def _adapter(self, name: str) -> EngineAdapter | None:
        if not name:
            return None
        if name not in self._adapters:
            raise UnknownAdapter(name, sorted(self._adapters))
        return self._adapters[name]

    def _add(self, prompt: list[int], params: SamplingParams, adapter: EngineAdapter | None) -> str:
        request_id = str(next(self._request_ids))
        self._engine.add_request(request_id, prompt, params, adapter=adapter)
        self._inboxes[request_id] = deque()
        return request_id

    def _events(self, request_id: str) -> Iterator[EngineEvent]:
        """Yield a request's events; whoever asks drives the engine, and keeps the others' for them."""
        inbox = self._inboxes[request_id]
        while inbox or self._engine.is_running(request_id):
            if inbox:
                yield inbox.popleft()
                continue
            for event in self._engine.step():
                self._inboxes[event.request_id].append(event)

    def _end(self, request_id: str) -> None:
        """Forget a request, and end it if it was left early."""
        if self._engine.is_running(request_id):
            self._engine.abort(request_id)
        del self._inboxes[request_id]


def _params(given: SamplingParams | Mapping[str, Any] | None, num_samples: int | None) -> SamplingParams:
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=0)
    return params if num_samples is None else replace(params, num_samples=num_samples)
