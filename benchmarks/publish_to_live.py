"""Time until an adapter generates tokens: a publish to a sampler, compared with a folder that the engine loads.

Both engines are vLLM with the same arguments, and the two methods alternate within one run. The second method, which
other systems use, writes safetensors and a configuration to a folder without fsync; the engine then loads the folder.

Both methods are warmed up by the same number of rounds, because the first allocations of memory are slow. The figures
are medians over the measured rounds: elapsed times, and CPU times, which depend less on other load. The CPU time
of publishing includes the client, the checkpoint service, the sampler and its engine. The CPU time of the folder
includes the client and its engine.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import yaml
from google.protobuf import duration_pb2
from safetensors.numpy import save_file
from vllm import SamplingParams as VllmParams
from vllm.lora.request import LoRARequest

from benchmarks.local_stack import running_stack
from benchmarks.processes import busy_seconds, with_children
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampler_service_pb2_grpc, sampling_pb2
from twinkle.checkpoint_engine import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_MODEL_FILE,
    adapter_config_json,
    plan_state,
)
from twinkle.data_format import LoraConfig, TensorData
from twinkle.hub import resolve_model
from twinkle.sampler.vllm import make_async_llm
from twinkle_client.stack import StackState
from twinkle_client.stack.options import DEFAULT_MODEL
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.rpc.tensors import tensor_to_proto
from twinkle_services.kit.weights import SegmentsConfig, open_segments
from twinkle_services.kit.weights.wire import WeightClient

RANKS = {'10_mb': 8, '100_mb': 80}
"""LoRA ranks by the approximate size in float32 of an adapter for all linear layers of the small real model."""
WARM_UP_ROUNDS = 15
ROUNDS = 15
ENGINE_ARGS: dict[str, Any] = {'max_num_seqs': 8, 'max_model_len': 256, 'max_loras': 3, 'max_lora_rank': 128}
PROMPT = list(range(100, 132))
TENANT = Caller(tenant_id='default', is_internal=True, scopes=frozenset({'sample', 'train'}))
_HIDDEN, _KEY_VALUE, _INTERMEDIATE, _LAYERS = 576, 192, 1536, 30
"""Sizes of the hidden state, of keys and values and of the MLP, and number of layers, of the small real model."""
_SHAPES = {
    'self_attn.q_proj': (_HIDDEN, _HIDDEN),
    'self_attn.k_proj': (_HIDDEN, _KEY_VALUE),
    'self_attn.v_proj': (_HIDDEN, _KEY_VALUE),
    'self_attn.o_proj': (_HIDDEN, _HIDDEN),
    'mlp.gate_proj': (_HIDDEN, _INTERMEDIATE),
    'mlp.up_proj': (_HIDDEN, _INTERMEDIATE),
    'mlp.down_proj': (_INTERMEDIATE, _HIDDEN),
}
"""Input and output sizes of the linear layers of the small real model."""


def main() -> dict[str, Any]:
    """Run the comparison and return its figures."""
    services = {'sampler': {'vllm': {'engine_args': ENGINE_ARGS}, 'max_resident_versions': 3}}
    with running_stack(engine='vllm', services=services) as stack:
        return asyncio.run(_measure(stack))


async def _measure(stack: StackState) -> dict[str, Any]:
    settings = yaml.safe_load((stack.state_dir / 'config' / 'sampler.yaml').read_text(encoding='utf-8'))
    addresses = {service.name: service.address for service in stack.services}
    token = settings['internal_token']
    checkpoint, sampler = (open_channel(addresses[name], internal_token=token) for name in ('checkpoint', 'sampler'))
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    engine = make_async_llm(str(resolve_model(DEFAULT_MODEL)), ENGINE_ARGS)
    try:
        with tempfile.TemporaryDirectory(prefix='twinkle-bench-') as folder, acting_for(TENANT):
            weights = WeightClient(checkpoint, segments=open_segments(SegmentsConfig()))
            stub = sampler_service_pb2_grpc.SamplerServiceStub(sampler)
            servers = [service.pid for service in stack.services if service.name in ('checkpoint', 'sampler')]
            published = _PublishMethod(weights, stub, with_children(*servers))
            cores = [process for process in psutil.Process().children(recursive=True) if process.pid not in others]
            from_file = _FolderMethod(engine, Path(folder), cores)
            return {name: await _compare(published, from_file, rank) for name, rank in RANKS.items()}
    finally:
        engine.shutdown()
        await checkpoint.close()
        await sampler.close()


async def _compare(published: '_PublishMethod', from_file: '_FolderMethod', rank: int) -> dict[str, Any]:
    """Return the median times until a version is loaded and until its first token for both methods, with ratios."""
    config = LoraConfig(r=rank, lora_alpha=rank)
    tensors = [_tensors(rank, seed=number) for number in range(2)]
    seconds: dict[str, list[float]] = {}
    for number in range(1, WARM_UP_ROUNDS + ROUNDS + 1):
        for name, method in (('published', published), ('file', from_file)):
            busy, begin = method.busy_seconds(), time.perf_counter()
            stages = await method.put(f'ad-bench-{rank}', number, tensors[number % 2], config)
            took = {'to_live': time.perf_counter() - begin, **stages, 'to_live_busy': method.busy_seconds() - busy}
            await method.first_token(f'ad-bench-{rank}', number)
            took['to_first_token'] = time.perf_counter() - begin
            for stage, value in took.items():
                seconds.setdefault(f'{name}_{stage}', []).append(value)
    median = {name: statistics.median(values[WARM_UP_ROUNDS:]) for name, values in seconds.items()}
    return {
        'adapter_mb': round(sum(len(tensor.data) for tensor in tensors[0].values()) / 1e6, 1),
        **{f'{name}_ms': round(1000 * value, 1) for name, value in median.items()},
        'times_faster_to_live': round(median['file_to_live'] / median['published_to_live'], 2),
        'times_faster_to_first_token': round(median['file_to_first_token'] / median['published_to_first_token'], 2),
        'goal': '>= 5 to live',
    }


class _PublishMethod:
    """Sends tensors through the checkpoint service to a sampler service."""

    def __init__(self, weights: WeightClient, sampler: Any, servers: list[psutil.Process]) -> None:
        self._weights = weights
        self._sampler = sampler
        self._servers = servers

    def busy_seconds(self) -> float:
        return time.process_time() + busy_seconds(self._servers)

    async def put(
        self, adapter_id: str, version: int, tensors: dict[str, TensorData], config: LoraConfig
    ) -> dict[str, float]:
        """Publish a version and load it into the sampler; return the duration of each stage in seconds."""
        begin = time.perf_counter()
        state = plan_state(tensors, base_model=DEFAULT_MODEL, lora_config=config)
        await self._weights.publish_version(adapter_id, state, version=version)
        responded = time.perf_counter()
        wait = duration_pb2.Duration(seconds=30)
        adapter = sampling_pb2.AdapterRef(adapter_id=adapter_id, exact=version, wait_timeout=wait)
        await self._sampler.LoadAdapter(wire.LoadAdapterRequest(adapter=adapter))
        return {'until_answered': responded - begin, 'until_loaded': time.perf_counter() - responded}

    async def first_token(self, adapter_id: str, version: int) -> None:
        request = wire.SampleRequest(
            base_model=DEFAULT_MODEL,
            adapter=sampling_pb2.AdapterRef(adapter_id=adapter_id, exact=version),
            prompt=sampling_pb2.Prompt(token_ids=tensor_to_proto(np.asarray(PROMPT, dtype=np.int32))),
            params=sampling_pb2.SamplingParams(max_tokens=1, temperature=0.0),
        )
        call: grpc.aio.UnaryStreamCall[Any, Any] = self._sampler.Sample(request)
        async for _ in call:
            continue


class _FolderMethod:
    """Writes tensors to a peft folder that the engine loads."""

    def __init__(self, engine: Any, folder: Path, servers: list[psutil.Process]) -> None:
        self._engine = engine
        self._servers = servers
        self._folder = folder
        self._requests: dict[str, LoRARequest] = {}

    def busy_seconds(self) -> float:
        return time.process_time() + busy_seconds(self._servers)

    async def put(
        self, adapter_id: str, version: int, tensors: dict[str, TensorData], config: LoraConfig
    ) -> dict[str, float]:
        """Write a version to a folder and load it into the engine; return the duration of each stage in seconds."""
        begin = time.perf_counter()
        folder = self._folder / f'{adapter_id}-{version}'
        await asyncio.to_thread(_write_folder, folder, tensors, config)
        written = time.perf_counter()
        if previous := self._requests.pop(adapter_id, None):
            await self._engine.remove_lora(previous.lora_int_id)
        number = 1000 * len(adapter_id) + version
        request = LoRARequest(f'{adapter_id}@{version}', number, str(folder))
        if not await self._engine.add_lora(request):
            raise RuntimeError('the engine did not load the adapter')
        self._requests[adapter_id] = request
        return {'until_written': written - begin, 'until_loaded': time.perf_counter() - written}

    async def first_token(self, adapter_id: str, version: int) -> None:
        params = VllmParams(max_tokens=1, temperature=0.0)
        request = self._requests[adapter_id]
        name = f'{adapter_id}-{version}'
        prompt = {'prompt_token_ids': PROMPT}
        async with aclosing(self._engine.generate(prompt, params, name, lora_request=request)) as outputs:
            async for _ in outputs:
                continue


def _write_folder(folder: Path, tensors: dict[str, TensorData], config: LoraConfig) -> None:
    folder.mkdir()
    arrays = {name: tensor.to_numpy() for name, tensor in tensors.items()}
    save_file(arrays, folder / ADAPTER_MODEL_FILE)
    text = adapter_config_json(config, base_model=DEFAULT_MODEL, tensor_names=list(tensors))
    (folder / ADAPTER_CONFIG_FILE).write_bytes(text)


def _tensors(rank: int, *, seed: int) -> dict[str, TensorData]:
    """Return an adapter for all linear layers, with values so small that outputs change little."""
    random = np.random.default_rng(seed)
    tensors: dict[str, TensorData] = {}
    for layer in range(_LAYERS):
        for name, (inputs, outputs) in _SHAPES.items():
            path = f'base_model.model.model.layers.{layer}.{name}'
            for part, shape in (('lora_A', (rank, inputs)), ('lora_B', (outputs, rank))):
                array = random.standard_normal(shape, dtype=np.float32) * np.float32(0.01)
                tensors[f'{path}.{part}.weight'] = TensorData.from_numpy(array)
    return tensors
