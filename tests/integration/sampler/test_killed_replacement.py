"""A sampler of a full-parameter run is killed while its base model is replaced. No response mixes two versions.

The sampler is a real process with the torch engine. A client sends requests continuously, across kills and restarts.
Every response that it receives, complete or interrupted, must belong to a single version.
"""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2
from safetensors.numpy import load_file

from fixtures import whole_publisher
from fixtures.checkpoint_service import ALICE as ALICE_SERVICE
from fixtures.checkpoint_service import ServiceProcess, failure_of
from fixtures.faulty_service import free_port
from fixtures.sampler_process import SamplerProcess
from fixtures.sampler_service import PROMPT, Answer, numbers, read_answer, sample_request, tenant
from fixtures.whole_models import whole_state
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.checkpoint_engine import pack_state
from twinkle.data_format import TensorData
from twinkle.sampler import TorchSampler
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights.wire import WeightClient

pytestmark = pytest.mark.timeout(420)

ALICE = tenant('alice')
RUN = whole_publisher.RUN
TOKENS = 24
"""Number of tokens of each response."""
SEEDS = 8
"""Number of different responses per version; equal responses are scored only once."""
CLOSE, FAR = 1e-4, 1e-2
"""Two computations for one version differ by less than CLOSE; another version or a mixture differs by more than FAR."""


def factor_of(version: int) -> float:
    """Return the factor by which a version multiplies the model's weights; consecutive versions differ strongly."""
    return (1.25, 0.75, 1.1, 0.9)[version % 4]


def ref(seconds: float = 60, **fields: int) -> sampling_pb2.AdapterRef:
    """Return a reference to the run."""
    wait = duration_pb2.Duration(nanos=int(seconds % 1 * 1e9), seconds=int(seconds))
    return sampling_pb2.AdapterRef(adapter_id=RUN, wait_timeout=wait, **fields)


class Oracle:
    """Scores tokens under each version with the library's sampler."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self.of_version = cache(self._of_version)
        self.scores = cache(self._scores)

    def _of_version(self, version: int) -> TorchSampler:
        sampler = TorchSampler(str(self._model))
        sampler.receive_weights(whole_state(self._model, factor=factor_of(version)))
        return sampler

    def _scores(self, version: int, tokens: tuple[int, ...]) -> list[float]:
        return scores_of(self.of_version(version), tokens)

    def mixture(self, old: int, new: int, count: int) -> TorchSampler:
        """Return a sampler with the first `count` weights of `new` and all other weights of `old`."""
        arrays = load_file(self._model / 'model.safetensors')
        tensors = {
            name: TensorData.from_numpy(array * np.float32(factor_of(new if index < count else old)))
            for index, (name, array) in enumerate(arrays.items())
        }
        sampler = TorchSampler(str(self._model))
        sampler.receive_weights(pack_state(tensors, base_model='tiny', lora_config=None))
        return sampler


def scores_of(sampler: TorchSampler, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token after the prompt."""
    (scored,) = sampler.sample([*PROMPT, *tokens], {'max_tokens': 0})
    return list(scored.prompt_logprobs[len(PROMPT) :])


@dataclass
class Received:
    """A complete or partial response that the client received."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    version: int = 0
    """Version in the last event of the response; 0 if the response was interrupted."""


@dataclass
class Deployment:
    """The services and the client; processes are killed and restarted."""

    model: Path
    folder: Path
    checkpoint: ServiceProcess
    settings: dict[str, object]
    sampler: SamplerProcess | None = None
    received: list[Received] = field(default_factory=list[Received])
    refusals: set[str] = field(default_factory=set[str])

    async def publish(self, version: int) -> None:
        state = whole_state(self.model, factor=factor_of(version), base_model=str(self.model))
        async with open_channel(self.checkpoint.address) as channel:
            with acting_for(ALICE_SERVICE):
                await WeightClient(channel).publish_version(RUN, state, version=version)

    async def publish_partially(self, version: int, messages: int) -> None:
        """Run a process that kills itself after it has sent the first messages of a publish."""
        arguments = (self.checkpoint.address, self.model, version, factor_of(version), messages)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, '-m', 'fixtures.whole_publisher'),
            *map(str, arguments),
            env={**os.environ, 'PYTHONPATH': f'{Path(__file__).parents[2]}:{os.environ.get("PYTHONPATH", "")}'},
        )
        assert await process.wait() == -signal.SIGKILL

    async def start_sampler(self, armed: str = '') -> SamplerProcess:
        """Start the next sampler process, and return it."""
        self.sampler = await SamplerProcess.start(self.folder / 'sampler', self.settings, armed=armed)
        return self.sampler

    async def restart_checkpoint(self) -> None:
        """Start the checkpoint service again on the same port."""
        self.checkpoint = await start_checkpoint(self.folder, self.checkpoint.address)

    async def answer(self, **fields: int) -> Answer:
        """Return a greedy answer of the running sampler."""
        assert self.sampler is not None
        request = sample_request(ref(**fields), base_model=str(self.model), params=PARAMS)
        return await read_answer(self.sampler.stub.Sample(request, metadata=ALICE))

    async def refusal(self, seconds: float = 0.05, **fields: int) -> str:
        """Return the reason with which a request is refused."""
        assert self.sampler is not None
        request = sample_request(ref(seconds, **fields), base_model=str(self.model), params=PARAMS)
        return (await failure_of(self.sampler.stub.Sample(request, metadata=ALICE))).reason

    async def send_requests(self) -> None:
        """Send one request after the other until cancelled."""
        async with grpc.aio.insecure_channel(str(self.settings['listen']), options=QUICK) as channel:
            stub = type(self.sampler.stub)(channel) if self.sampler else None
            assert stub is not None
            for seed in itertools.cycle(range(SEEDS)):
                params = {**PARAMS, 'temperature': 1.0, 'seed': seed}
                request = sample_request(ref(0.5), base_model=str(self.model), params=params)
                await self._send(stub.Sample(request, metadata=ALICE))

    async def _send(self, call: grpc.aio.UnaryStreamCall) -> None:
        received = Received()
        try:
            async for response in call:
                if response.HasField('delta'):
                    received.tokens += numbers(response.delta.token_ids)
                    received.logprobs += numbers(response.delta.logprobs)
                elif response.HasField('finished'):
                    ((span),) = response.finished.version_spans
                    received.version = span.version
        except grpc.aio.AioRpcError as error:
            self.refusals.add(error.code().name)
        if received.tokens:
            self.received.append(received)


PARAMS = {'temperature': 0.0, 'max_tokens': TOKENS}
QUICK = (('grpc.initial_reconnect_backoff_ms', 50), ('grpc.max_reconnect_backoff_ms', 200))
"""Channel options for a fast reconnect."""


async def start_checkpoint(folder: Path, address: str) -> ServiceProcess:
    """Start the checkpoint service at an address."""
    return await ServiceProcess.start(folder, f'listen={address}', 'telemetry.log_level=ERROR')


@asynccontextmanager
async def deployed(folder: Path, model: Path) -> AsyncIterator[Deployment]:
    """Yield a deployment with a checkpoint service; at the end, all running processes are killed."""
    checkpoint = await start_checkpoint(folder, f'127.0.0.1:{free_port()}')
    settings: dict[str, object] = {
        'listen': f'127.0.0.1:{free_port()}',
        'base_model': model,
        'checkpoint_address': checkpoint.address,
        'follow_run': RUN,
        'follow_tenant': 'alice',
        'shared_memory.folder': folder / 'memory',
        'telemetry.log_level': 'ERROR',
    }
    deployment = Deployment(model, folder, checkpoint, settings)
    try:
        yield deployment
    finally:
        if deployment.sampler is not None:
            await deployment.sampler.kill()
        await deployment.checkpoint.kill()


@asynccontextmanager
async def sending_requests(deployment: Deployment) -> AsyncIterator[None]:
    """Send the client's requests during this block."""
    task = asyncio.create_task(deployment.send_requests())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


def check_version(answer: Answer, version: int, oracle: Oracle) -> None:
    """Check that an answer belongs to a version."""
    assert answer.spans == [[(version, 0, TOKENS)]]
    assert answer.logprobs[0] == pytest.approx(oracle.scores(version, tuple(answer.tokens[0])), rel=0, abs=CLOSE)


def check_received(deployment: Deployment, oracle: Oracle, versions: Sequence[int]) -> None:
    """Check that each response belongs to one version: the reported version, or any version if none was reported."""
    assert deployment.received
    for received in deployment.received:
        tokens = tuple(received.tokens)
        possible = [received.version] if received.version else versions
        assert any(
            received.logprobs == pytest.approx(oracle.scores(version, tokens), rel=0, abs=CLOSE) for version in possible
        )
    assert {received.version for received in deployment.received} - {0} <= set(versions)


def failpoints_of(model: Path) -> list[str]:
    """Return the failpoints of the second replacement: around it, and before its second, middle and last weight."""
    count = len(load_file(model / 'model.safetensors'))
    middle = [f'replacement.tensor={count + index}' for index in (2, count // 2, count)]
    return ['replacement.staged=2', 'replacement.begun=2', *middle, 'replacement.done=2', 'replacement.served=2']


async def test_mixture_of_versions_is_detected(tiny_llama_dir: Path) -> None:
    """The scores of a mixture of two versions, and of the original model, differ clearly from those of both."""
    oracle, tokens = Oracle(tiny_llama_dir), tuple(range(50, 50 + TOKENS))
    count = len(load_file(tiny_llama_dir / 'model.safetensors'))
    mixtures = [oracle.mixture(1, 2, new_count) for new_count in (1, count // 2, count - 1)]
    invalid_samplers = [*mixtures, TorchSampler(str(tiny_llama_dir))]
    for sampler in invalid_samplers:
        for version in (1, 2):
            own, expected = scores_of(sampler, tokens), oracle.scores(version, tokens)
            assert max(abs(one - other) for one, other in zip(own, expected, strict=True)) > FAR


@pytest.mark.slow
async def test_kill_during_a_replacement_leaves_a_complete_version(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Each response before, during and after a kill at any failpoint belongs to a single version."""
    oracle = Oracle(tiny_llama_dir)
    async with deployed(tmp_path, tiny_llama_dir) as deployment:
        await deployment.publish(1)
        old = 1
        for armed in failpoints_of(tiny_llama_dir):
            process = await deployment.start_sampler(armed)
            check_version(await deployment.answer(at_least=old), old, oracle)
            async with sending_requests(deployment):
                await deployment.publish(old + 1)
                await process.until_dead()
            old += 1
        await deployment.start_sampler()
        check_version(await deployment.answer(at_least=old), old, oracle)
        assert await deployment.refusal(exact=old - 1) == 'VERSION_NOT_FOUND'
    assert old == 1 + len(failpoints_of(tiny_llama_dir))
    check_received(deployment, oracle, range(1, old + 1))


@pytest.mark.slow
async def test_restarted_sampler_needs_the_checkpoint_service(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A restarted sampler refuses requests until it reaches the checkpoint service, then serves the newest version."""
    oracle = Oracle(tiny_llama_dir)
    middle = failpoints_of(tiny_llama_dir)[3]
    async with deployed(tmp_path, tiny_llama_dir) as deployment:
        await deployment.publish(1)
        process = await deployment.start_sampler(middle)
        check_version(await deployment.answer(at_least=1), 1, oracle)
        async with sending_requests(deployment):
            await deployment.publish(2)
            await process.until_dead()
            await deployment.checkpoint.kill()
            await deployment.start_sampler()
            assert await deployment.refusal() == 'VERSION_NOT_READY'
            await deployment.restart_checkpoint()
            check_version(await deployment.answer(at_least=2), 2, oracle)
    check_received(deployment, oracle, (1, 2))
    assert 'UNAVAILABLE' in deployment.refusals


@pytest.mark.slow
async def test_partially_published_version_is_never_served(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A version that a killed process has published partially is never served."""
    oracle = Oracle(tiny_llama_dir)
    async with deployed(tmp_path, tiny_llama_dir) as deployment:
        await deployment.publish(1)
        process = await deployment.start_sampler()
        check_version(await deployment.answer(at_least=1), 1, oracle)
        async with sending_requests(deployment):
            await deployment.publish_partially(2, messages=8)
            await process.kill()
            await deployment.start_sampler()
            check_version(await deployment.answer(at_least=1), 1, oracle)
            assert await deployment.refusal(at_least=2) == 'VERSION_NOT_READY'
            await deployment.publish(2)
            check_version(await deployment.answer(at_least=2), 2, oracle)
    check_received(deployment, oracle, (1, 2))
    assert 'UNAVAILABLE' in deployment.refusals
