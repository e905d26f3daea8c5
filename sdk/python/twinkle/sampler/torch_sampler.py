"""`TorchSampler`, which runs the torch engine in this process."""

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch

from twinkle.checkpoint_engine import BaseSource, DigestMismatch, PackedState, state_digest, unpack_state
from twinkle.data_format import LoraConfig, SampleResults, SamplingParams
from twinkle.hub import resolve_model
from twinkle.infra import DeviceMesh, refuse_many_ranks, remote_class, remote_function
from twinkle.nn import LoraWeights, PackedCausalLM, load_adapter, replace_parameters, tensor_of
from twinkle.sampler.base import Sampler, SamplerInput
from twinkle.sampler.engine import EngineAdapter, EngineConfig, EngineEvent, PromptMedia, SamplerEngine, TokenEvent
from twinkle.sampler.errors import SamplerBusy, UnknownAdapter
from twinkle.sampler.inputs import prompt_feature, sampling_params_of, split_inputs
from twinkle.sampler.prompt_media import prompt_media
from twinkle.sampler.received import ReceivedAdapters
from twinkle.sampler.response import ResponseBuilder

_ENGINE_ARGS = {
    'max_num_seqs': 'max_sequences',
    'max_num_batched_tokens': 'max_batch_tokens',
    'max_model_len': 'max_model_len',
    'kv_cache_memory_bytes': 'kv_cache_memory_bytes',
}
"""Fields of `EngineConfig`, by the names of the corresponding vLLM arguments."""
_MODEL_ARGS = ('dtype', 'device')


@remote_class(execute='all')
class TorchSampler(Sampler):
    """Samples in this process on one device, with continuous batching.

    Greedy decoding gives the same tokens as `generate` of transformers.

    Args:
        model_id: hub id or folder.
        engine_args: 'dtype' and 'device' (default: float32 on the CPU), 'max_num_seqs', 'max_num_batched_tokens',
            'max_model_len', 'kv_cache_memory_bytes'.
        device_mesh: a mesh of one rank; with `remote_group`, one rank per worker, each with a separate engine.
        model: an already loaded model of `model_id` to use, such as a trainer's.
        device: default of 'device' in `engine_args`. None: the device of the sampler's group, if it is in a group.

    Raises:
        ValueError: an engine argument is unknown or out of range, or `model` is not on 'device'.
        UnsupportedModel: the torch engine does not support the architecture.
        TemplateError: the model has no fast tokenizer or no valid chat template.
        NotSupportedYet: the mesh has more than one rank.
        HubError: the model cannot be downloaded.

    Concurrency: one thread at a time.
    """

    def __init__(
        self,
        model_id: str,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        model: PackedCausalLM | None = None,
        device: str | None = None,
    ) -> None:
        refuse_many_ranks(device_mesh)
        args = {**({} if device is None else {'device': device}), **(engine_args or {})}
        unknown = sorted(set(args) - {*_ENGINE_ARGS, *_MODEL_ARGS})
        if unknown:
            known = [*_MODEL_ARGS, *_ENGINE_ARGS]
            raise ValueError(f'engine_args {unknown} are not supported by the torch engine; supported are {known}')
        if model is not None and torch.device(args.get('device', model.device)).type != model.device.type:
            raise ValueError(f'device is {args["device"]!r}, but the model is on {model.device}; leave device out')
        self.model_id = model_id
        model_args = {name: args[name] for name in _MODEL_ARGS if name in args}
        folder = resolve_model(model_id)
        self._model = model or PackedCausalLM.load(folder, **model_args)
        self._is_model_shared = model is not None
        self._base_source = BaseSource(model_folder=str(folder.resolve()), dtype=self._model.dtype_name)
        self._received = ReceivedAdapters()
        limits = {field: args[name] for name, field in _ENGINE_ARGS.items() if name in args}
        self._engine = SamplerEngine(self._model, tokenizer=self.template.tokenizer, config=EngineConfig(**limits))
        self._adapters: dict[str, EngineAdapter] = {}
        self._base_adapter: EngineAdapter | None = None
        self._versions: Counter[str] = Counter()
        self._request_ids = itertools.count()
        self._queued_events: dict[str, deque[EngineEvent]] = {}

    def add_adapter_to_sampler(
        self, adapter_name: str, config_or_dir: LoraConfig | LoraWeights | str | PathLike[str]
    ) -> None:
        """Add an adapter, or replace it with a new version. Running requests keep their version.

        Args:
            adapter_name: name of the adapter for `sample`; not empty.
            config_or_dir: a PEFT folder, weights, or a configuration (`LoraConfig` or PEFT's) for newly initialized
                weights, which have no effect yet.

        Raises:
            ValueError: the name is empty, or the adapter does not fit the model.
            TypeError: the configuration has an unknown key or no rank.
            InvalidPeftFolder: the folder does not contain a supported adapter.
        """
        if not adapter_name:
            raise ValueError('adapter_name must not be empty, because the empty name means the base model')
        weights = self._load(config_or_dir)
        self._adapters[adapter_name] = EngineAdapter(adapter_name, self._next_version(adapter_name), weights)

    @property
    def base_source(self) -> BaseSource:
        """Origin of the base weights."""
        return self._base_source

    def receive_weights(self, state: PackedState, *, adapter_name: str = '') -> int:
        """Verify and load weights from memory; see `Sampler.receive_weights`.

        Raises:
            DigestMismatch, SamplerBusy: see `Sampler.receive_weights`.
            ValueError: see `Sampler.receive_weights`; or the state contains base weights, and this sampler was created
                with `model`.
        """
        actual = state_digest(state.data)
        if actual != state.manifest.digest:
            raise DigestMismatch(state.manifest.digest, actual)
        config = state.manifest.lora_config
        if config is None:
            return self._receive_base(state, adapter_name)
        tensors = {name: tensor_of(data) for name, data in unpack_state(state.manifest, state.data).items()}
        weights = LoraWeights.from_peft_state(self._model.targets, config, tensors, device=str(self._model.device))
        self.add_adapter_to_sampler(adapter_name, weights)
        self._received.add(adapter_name)
        return self._adapters[adapter_name].version

    @remote_function(dispatch='slice_dp', collect='flatten')
    def sample(
        self,
        inputs: SamplerInput | Sequence[SamplerInput],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = '',
        *,
        num_samples: int | None = None,
        use_base_model: bool = False,
    ) -> SampleResults:
        """Return the completions of each input, in order; see `Sampler.sample`."""
        params = sampling_params_of(sampling_params, num_samples)
        adapter = self._adapter(self._received.chosen(adapter_name, use_base_model=use_base_model))
        features = [prompt_feature(item, self.encode_trajectory) for item in split_inputs(inputs)]
        media = [prompt_media(feature, self._model.media) for feature in features]
        prompts = [[int(token_id) for token_id in feature['input_ids']] for feature in features]
        for prompt in prompts:
            self._engine.admission.check(prompt, params)
        builders: dict[str, ResponseBuilder] = {}
        try:
            for feature, prompt, item in zip(features, prompts, media, strict=True):
                request_id = self._add(prompt, params, adapter, media=item)
                builders[request_id] = ResponseBuilder(feature, params.num_samples)
            for request_id, builder in builders.items():
                for event in self._events(request_id):
                    builder.add(event)
        finally:
            for request_id in builders:
                self._end(request_id)
        return SampleResults(builder.build(self.template) for builder in builders.values())

    @remote_function(dispatch='all', execute='first', collect='first')
    def sample_stream(
        self,
        inputs: SamplerInput,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = '',
        *,
        num_samples: int | None = None,
        use_base_model: bool = False,
    ) -> Iterator[TokenEvent]:
        """Yield the tokens of one input as they are sampled. Closing the iterator aborts the request.

        The errors are the same as for `sample`. The iterator raises the errors when the first event is requested.
        """
        params = sampling_params_of(sampling_params, num_samples)
        (item,) = split_inputs(inputs)
        feature = prompt_feature(item, self.encode_trajectory)
        adapter = self._adapter(self._received.chosen(adapter_name, use_base_model=use_base_model))
        media = prompt_media(feature, self._model.media)
        request_id = self._add([int(token) for token in feature['input_ids']], params, adapter, media=media)
        try:
            yield from (event for event in self._events(request_id) if isinstance(event, TokenEvent))
        finally:
            self._end(request_id)

    def reset_prefix_cache(self) -> None:
        """Return without effect, because this engine does not cache prefixes across requests."""

    def _load(self, source: LoraConfig | LoraWeights | str | PathLike[str]) -> LoraWeights:
        device = str(self._model.device)
        if isinstance(source, LoraWeights):
            return source
        if isinstance(source, str | PathLike):
            return load_adapter(source, self._model.targets, device=device)
        config = LoraConfig.of(source)
        return LoraWeights.create(self._model.targets, config, seed=config.seed or 0, device=device)

    def _receive_base(self, state: PackedState, adapter_name: str) -> int:
        if adapter_name:
            raise ValueError(f'adapter_name is {adapter_name!r}, but the state contains base weights; leave it out')
        if self._is_model_shared:
            raise ValueError(
                'the base weights cannot be replaced, because other objects may use the model given to this sampler; '
                'create the sampler without model= to load a separate model'
            )
        if not self._engine.is_idle:
            raise SamplerBusy
        tensors = unpack_state(state.manifest, state.data)
        missing = sorted(self._model.base_parameters.keys() - tensors.keys())
        if missing:
            raise ValueError(f'the state lacks weights of the model, such as {missing[:3]}; send all of them')
        replace_parameters(self._model, tensors)
        self._base_source = replace(self._base_source, digest=state.manifest.digest)
        # An adapter without layers. It only sets the version of tokens sampled with the base model.
        self._base_adapter = EngineAdapter('', self._next_version(''), LoraWeights(LoraConfig(), {}, seed=0))
        self._adapters.clear()
        self._received.clear()
        return self._base_adapter.version

    def _next_version(self, name: str) -> int:
        self._versions[name] += 1
        return self._versions[name]

    def _adapter(self, name: str) -> EngineAdapter | None:
        if not name:
            return self._base_adapter
        if name not in self._adapters:
            raise UnknownAdapter(name, sorted(self._adapters))
        return self._adapters[name]

    def _add(
        self, prompt: list[int], params: SamplingParams, adapter: EngineAdapter | None, *, media: PromptMedia | None
    ) -> str:
        request_id = str(next(self._request_ids))
        self._engine.add_request(request_id, prompt, params, adapter=adapter, media=media)
        self._queued_events[request_id] = deque()
        return request_id

    def _events(self, request_id: str) -> Iterator[EngineEvent]:
        """Yield a request's events. Iteration steps the engine and queues the events of other requests."""
        queue = self._queued_events[request_id]
        while queue or self._engine.is_running(request_id):
            if queue:
                yield queue.popleft()
                continue
            for event in self._engine.step():
                self._queued_events[event.request_id].append(event)

    def _end(self, request_id: str) -> None:
        """Remove a request, and abort it if it is still running."""
        if self._engine.is_running(request_id):
            self._engine.abort(request_id)
        del self._queued_events[request_id]
