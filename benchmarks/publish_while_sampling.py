"""Effect of published versions on running streams, measured at the client and in the steps of the engine.

A real stack serves concurrent streams. Each stream samples one completion after the other from the newest version. The
run has three phases: without publishes, with publishes at a steady rate, and again without publishes. The gaps between
two tokens of a completion are compared within the run. The engine core logs each of its steps. The log shows the number
of steps between two tokens of a sequence, which does not depend on other load of the machine. The log also shows the
gaps in the engine, which exclude the time of services and client.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import yaml

from benchmarks.local_stack import running_stack
from benchmarks.random_adapter import random_adapter
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampler_service_pb2_grpc, sampling_pb2
from twinkle.checkpoint_engine import plan_state
from twinkle.data_format import LoraConfig, TensorData
from twinkle.hub import resolve_model
from twinkle.sampler.vllm.step_log import SCHEDULER, Step, read_steps
from twinkle_client.stack import StackState
from twinkle_client.stack.options import DEFAULT_MODEL
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.rpc.tensors import tensor_to_proto
from twinkle_services.kit.weights import SegmentsConfig, open_segments
from twinkle_services.kit.weights.wire import WeightClient

ADAPTER_ID = 'ad-bench'
TENANT = Caller(tenant_id='default', is_internal=True, scopes=frozenset({'sample', 'train'}))
PROMPT_TOKENS = 16
SLOTS = 32
"""Number of LoRA slots, which limits the versions in use at the same time. It is so large that no stream waits."""
_MIN_VALUES = 2
"""Minimum number of values for which quantiles are defined."""


@dataclass
class _Completion:
    """One completion as received by its client."""

    begin: float
    times: list[float] = field(default_factory=list[float])
    """Arrival time of each token."""
    version: int = 0
    reason: int = sampling_pb2.STOP_REASON_UNSPECIFIED


@dataclass
class _Run:
    """Recorded data of a run; times are from `time.monotonic`."""

    completions: list[_Completion] = field(default_factory=list[_Completion])
    publishing: tuple[float, float] = (0.0, 0.0)
    quiet: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    publish_seconds: list[float] = field(default_factory=list[float])


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the comparison and return its figures."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix='twinkle-bench-') as folder:
        log = Path(folder) / 'steps.jsonl'
        engine_args = {
            'max_num_seqs': options.streams,
            'max_model_len': 512,
            'max_loras': SLOTS,
            'scheduler_cls': SCHEDULER,
            'additional_config': {'step_log': str(log)},
        }
        sampler = {'vllm': {'engine_args': engine_args}, 'max_resident_versions': 2 * SLOTS}
        load = os.getloadavg()[0]
        with running_stack(options.model, engine='vllm', services={'sampler': sampler}) as stack:
            run = asyncio.run(_measure(stack, options))
        return {
            'options': vars(options),
            'load_before': round(load, 1),
            **_figures(run, list(read_steps(log))),
        }


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='./run bench publish_while_sampling')
    parser.add_argument(
        '--model', default=DEFAULT_MODEL, help='hub id, alias or folder of a model with the Llama architecture'
    )
    parser.add_argument('--streams', type=int, default=32)
    parser.add_argument('--versions', type=int, default=100, help='number of versions to publish while the streams run')
    parser.add_argument('--seconds-between', type=float, default=0.5, help='time between two versions')
    parser.add_argument('--new-tokens', type=int, default=32, help='tokens per completion')
    parser.add_argument('--lora-rank', type=int, default=8)
    return parser.parse_args(arguments)


async def _measure(stack: StackState, options: argparse.Namespace) -> _Run:
    settings = yaml.safe_load((stack.state_dir / 'config' / 'sampler.yaml').read_text(encoding='utf-8'))
    addresses = {service.name: service.address for service in stack.services}
    checkpoint = open_channel(addresses['checkpoint'], internal_token=settings['internal_token'])
    run = _Run()
    async with checkpoint, grpc.aio.insecure_channel(stack.address) as channel:
        weights = WeightClient(checkpoint, segments=open_segments(SegmentsConfig()))
        publisher = _Publisher(weights, options, run)
        await publisher.publish(1)
        streams = _Streams(channel, stack, options, run)
        tasks = [asyncio.create_task(streams.run(index)) for index in range(options.streams)]
        await streams.wait_for_first_completions()
        half = options.versions * options.seconds_between / 2
        run.quiet.append(await _idle_phase(half))
        run.publishing = await publisher.publish_all()
        run.quiet.append(await _idle_phase(half))
        streams.is_done = True
        await asyncio.gather(*tasks)
    return run


async def _idle_phase(seconds: float) -> tuple[float, float]:
    begin = time.monotonic()
    await asyncio.sleep(seconds)
    return begin, time.monotonic()


class _Publisher:
    """Publishes versions of an adapter directly to the checkpoint service, as a model service does."""

    def __init__(self, weights: WeightClient, options: argparse.Namespace, run: _Run) -> None:
        self._weights = weights
        self._options = options
        self._run = run
        folder = resolve_model(options.model)
        self._tensors: list[dict[str, TensorData]] = [
            random_adapter(folder, options.lora_rank, seed=seed) for seed in range(2)
        ]

    async def publish(self, version: int) -> None:
        rank = self._options.lora_rank
        state = plan_state(
            self._tensors[version % 2],
            base_model=self._options.model,
            lora_config=LoraConfig(r=rank, lora_alpha=rank),
        )
        with acting_for(TENANT):
            await self._weights.publish_version(ADAPTER_ID, state, version=version)

    async def publish_all(self) -> tuple[float, float]:
        begin = time.monotonic()
        for number in range(self._options.versions):
            due = begin + number * self._options.seconds_between
            await asyncio.sleep(max(due - time.monotonic(), 0))
            start = time.monotonic()
            await self.publish(2 + number)
            self._run.publish_seconds.append(time.monotonic() - start)
        await asyncio.sleep(self._options.seconds_between)
        return begin, time.monotonic()


class _Streams:
    """Samples the newest version through the gateway in many concurrent streams."""

    def __init__(self, channel: grpc.aio.Channel, stack: StackState, options: argparse.Namespace, run: _Run) -> None:
        self._stub = sampler_service_pb2_grpc.SamplerServiceStub(channel)
        self._metadata = (('authorization', f'Bearer {stack.read_api_key()}'),)
        self._options = options
        self._run = run
        self._ends = asyncio.Semaphore(0)
        self.is_done = False
        """Whether every stream stops after its current completion."""

    async def run(self, index: int) -> None:
        for seed in range(index, 1 << 30, self._options.streams):
            await self._sample(seed)
            self._ends.release()
            if self.is_done:
                return

    async def wait_for_first_completions(self) -> None:
        for _ in range(self._options.streams):
            await self._ends.acquire()

    async def _sample(self, seed: int) -> None:
        # The tiny model of the tests has a small vocabulary.
        prompt = np.random.default_rng(seed).integers(5, 250, PROMPT_TOKENS).astype(np.int32)
        request = wire.SampleRequest(
            base_model=self._options.model,
            adapter=sampling_pb2.AdapterRef(adapter_id=ADAPTER_ID),
            prompt=sampling_pb2.Prompt(token_ids=tensor_to_proto(prompt)),
            params=sampling_pb2.SamplingParams(max_tokens=self._options.new_tokens, is_eos_ignored=True, seed=seed),
        )
        completion = _Completion(time.monotonic())
        async for response in self._stub.Sample(request, metadata=self._metadata):
            if response.HasField('delta'):
                completion.times += [time.monotonic()] * (len(response.delta.token_ids.data) // 4)
            elif response.HasField('finished'):
                completion.reason = response.finished.stop_reason
                completion.version = response.finished.version_spans[0].version
        self._run.completions.append(completion)


def _figures(run: _Run, steps: Sequence[Step]) -> dict[str, Any]:
    without, with_versions = (_phase_figures(run, steps, spans) for spans in (run.quiet, [run.publishing]))
    usual = without['step_ms']['p50']
    return {
        'publish_until_answered_ms': _spread(run.publish_seconds),
        'without_publishing': without,
        'while_publishing': with_versions,
        'longest_gap_in_usual_steps': {
            'without_publishing': round(without['gap_in_engine_ms']['max'] / usual, 2),
            'while_publishing': round(with_versions['gap_in_engine_ms']['max'] / usual, 2),
        },
        'answers': len(run.completions),
        'answers_that_ended_early': sum(item.reason != sampling_pb2.STOP_REASON_LENGTH for item in run.completions),
        'versions_that_answered': len({item.version for item in run.completions}),
        'goal': 'most_steps_between_tokens is 1, except after preemptions',
    }


def _phase_figures(run: _Run, steps: Sequence[Step], spans: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the figures of the engine steps and of the received tokens within the given time spans."""

    def is_within(at: float) -> bool:
        return any(begin <= at <= end for begin, end in spans)

    phase_steps = [step for step in steps if is_within(step.at)]
    between = [count for step in phase_steps for count in step.steps_since.values() if count]
    at_client = [
        after - before for item in run.completions for before, after in pairwise(item.times) if is_within(after)
    ]
    first = [item.times[0] - item.begin for item in run.completions if is_within(item.times[0])]
    seconds = sum(end - begin for begin, end in spans)
    return {
        'seconds': round(seconds, 1),
        'tokens_per_second': round(sum(len(step.steps_since) for step in phase_steps) / seconds, 1),
        'steps': len(phase_steps),
        'most_steps_between_tokens': max(between),
        'gaps_of_several_steps': sum(count > 1 for count in between),
        'preemptions': sum(len(step.preempted) for step in phase_steps),
        'step_ms': _spread(after.at - before.at for before, after in pairwise(steps) if is_within(after.at)),
        'gap_in_engine_ms': _spread(_gaps_in_engine(steps, is_within)),
        'gap_at_client_ms': _spread(at_client),
        'first_token_ms': _spread(first),
    }


def _gaps_in_engine(steps: Sequence[Step], is_within: Any) -> Iterable[float]:
    """Yield the seconds between two tokens of a sequence in the engine core."""
    last: dict[str, float] = {}
    for step in steps:
        for name, count in step.steps_since.items():
            if count and is_within(step.at):
                yield step.at - last[name]
            last[name] = step.at


def _spread(seconds: Iterable[float]) -> dict[str, float]:
    values = sorted(1000 * value for value in seconds)
    if len(values) < _MIN_VALUES:
        return {name: round(sum(values), 1) for name in ('p50', 'p99', 'max')}
    cuts = statistics.quantiles(values, n=100, method='inclusive')
    return {'p50': round(cuts[49], 1), 'p99': round(cuts[98], 1), 'max': round(values[-1], 1)}
