"""Tokens per second that are streamed through the gateway, compared with plain vLLM, which is called directly.

Both engines have the same arguments, data type and number of threads, except that the plain one has no adapters and no
changes by Twinkle. They alternate within one run; an idle engine uses no CPU. Through the gateway, a token is sent from
the engine through the sampler service and the gateway to the client, each in a separate process.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
from vllm import SamplingParams as VllmParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.local_stack import THREADS, running_stack
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampler_service_pb2_grpc, sampling_pb2
from twinkle.hub import resolve_model
from twinkle.sampler.vllm.options import engine_args, prepare_environment
from twinkle_client.stack import StackState
from twinkle_client.stack.options import DEFAULT_MODEL
from twinkle_services.kit.rpc.tensors import tensor_to_proto

CONCURRENCIES = (1, 8, 32)
ROUNDS = 5
PROMPT_TOKENS = 32
NEW_TOKENS = 48
DTYPE = 'float32'
ENGINE_ARGS: dict[str, Any] = {'max_num_seqs': 32, 'max_model_len': 512, 'enable_prefix_caching': False}
"""Arguments of both engines. The prefix cache is disabled, so that each round computes all tokens."""

Run = Callable[[list[int], int], Awaitable[int]]


def main() -> dict[str, Any]:
    """Run the comparison and return its figures."""
    services = {'sampler': {'vllm': {'engine_args': ENGINE_ARGS}}}
    with running_stack(engine='vllm', dtype=DTYPE, services=services) as stack:
        return asyncio.run(_measure(stack))


async def _measure(stack: StackState) -> dict[str, Any]:
    engine = _start_plain_vllm()
    try:
        async with grpc.aio.insecure_channel(stack.address) as channel:
            methods: dict[str, Run] = {
                'in_process': lambda prompt, seed: _in_process(engine, prompt, seed),
                'through_gateway': _Gateway(channel, stack),
            }
            for run in methods.values():
                await run(_prompt(0), 0)
            return {str(count): await _compare(methods, count) for count in CONCURRENCIES}
    finally:
        engine.shutdown()


def _start_plain_vllm() -> AsyncLLM:
    """Start vLLM without support for adapters and without the worker extension that changes vLLM."""
    prepare_environment(thread_count=THREADS)
    args = engine_args(str(resolve_model(DEFAULT_MODEL)), {**ENGINE_ARGS, 'dtype': DTYPE})
    return AsyncLLM.from_engine_args(replace(args, enable_lora=False, worker_extension_cls=''))


async def _compare(methods: dict[str, Run], concurrency: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(ROUNDS):
        prompts = [_prompt(1000 * number + index) for index in range(concurrency)]
        for name, run in methods.items():
            begin = time.perf_counter()
            counts = await asyncio.gather(*(run(prompt, index) for index, prompt in enumerate(prompts)))
            rates[name].append(sum(counts) / (time.perf_counter() - begin))
            if sum(counts) != concurrency * NEW_TOKENS:
                raise RuntimeError(f'{name} sampled {sum(counts)} tokens instead of {concurrency * NEW_TOKENS}')
    ratios = [through / alone for through, alone in zip(rates['through_gateway'], rates['in_process'], strict=True)]
    return {
        **{f'{name}_tokens_per_second': round(statistics.median(values), 1) for name, values in rates.items()},
        'ratio': round(statistics.median(ratios), 3),
        'ratio_of_rounds': [round(ratio, 3) for ratio in sorted(ratios)],
        'goal': '>= 0.95',
    }


async def _in_process(engine: Any, prompt: list[int], seed: int) -> int:
    params = VllmParams(
        max_tokens=NEW_TOKENS,
        min_tokens=NEW_TOKENS,
        ignore_eos=True,
        seed=seed,
        logprobs=0,
        detokenize=True,
        output_kind=RequestOutputKind.DELTA,
    )
    count = 0
    request_id = f'{seed}-{time.monotonic_ns()}'
    async with aclosing(engine.generate({'prompt_token_ids': prompt}, params, request_id)) as outputs:
        async for output in outputs:
            count += len(output.outputs[0].token_ids)
    return count


class _Gateway:
    """Samples prompts through the gateway of a stack."""

    def __init__(self, channel: grpc.aio.Channel, stack: StackState) -> None:
        self._stub = sampler_service_pb2_grpc.SamplerServiceStub(channel)
        self._metadata = (('authorization', f'Bearer {stack.read_api_key()}'),)
        self._base_model = stack.base_model

    async def __call__(self, prompt: list[int], seed: int) -> int:
        request = wire.SampleRequest(
            base_model=self._base_model,
            prompt=sampling_pb2.Prompt(token_ids=tensor_to_proto(np.asarray(prompt, dtype=np.int32))),
            params=sampling_pb2.SamplingParams(max_tokens=NEW_TOKENS, is_eos_ignored=True, seed=seed),
        )
        count = 0
        async for response in self._stub.Sample(request, metadata=self._metadata):
            if response.HasField('delta'):
                count += len(response.delta.token_ids.data) // 4
        return count


def _prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 40_000, PROMPT_TOKENS).tolist()
