"""A sampler of a full-parameter run is killed while its base model is replaced: no answer is ever of a mixture.

Its process is a real one, on the torch engine. Meanwhile a client asks without pause, across the death and the new
start. Whatever it was told, whole answers and parts of answers that broke off, has to be one version's.
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
from services.kit.rpc.channel import open_channel
from services.kit.rpc.context import acting_for
from services.kit.rpc.weights import WeightClient
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.checkpoint_engine import pack_state
from twinkle.data_format import TensorData
from twinkle.sampler import TorchSampler

pytestmark = pytest.mark.timeout(420)

ALICE = tenant('alice')
RUN = whole_publisher.RUN
TOKENS = 24
SEEDS = 8
"""Of a version so many answers are heard again and again: each is checked, and few have to be scored."""
CLOSE, FAR = 1e-4, 1e-2
"""A version's log-probabilities are closer than CLOSE; another's, and a mixture's, are farther than FAR somewhere."""


def factor_of(version: int) -> float:
    """Return what a version multiplies the model's weights by; consecutive ones are far apart."""
    return (1.25, 0.75, 1.1, 0.9)[version % 4]


def ref(seconds: float = 60, **wanted: int) -> sampling_pb2.AdapterRef:
    """Return a reference to the run."""
    wait = duration_pb2.Duration(nanos=int(seconds % 1 * 1e9), seconds=int(seconds))
    return sampling_pb2.AdapterRef(adapter_id=RUN, wait_timeout=wait, **wanted)


class Oracle:
    """What each version says, by the library's own sampler."""

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
        """Return what a sampler would be that has the first `count` weights new and the others old."""
        arrays = load_file(self._model / 'model.safetensors')
        tensors = {
            name: TensorData.from_numpy(array * np.float32(factor_of(new if place < count else old)))
            for place, (name, array) in enumerate(arrays.items())
        }
        sampler = TorchSampler(str(self._model))
        sampler.receive_weights(pack_state(tensors, base_model='tiny', lora_config=None))
        return sampler


def scores_of(sampler: TorchSampler, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token after the prompt."""
    (scored,) = sampler.sample([*PROMPT, *tokens], {'max_tokens': 0})
    return list(scored.prompt_logprobs[len(PROMPT) :])


@dataclass
class Heard:
    """What the client was told, whole or in part."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    version: int = 0
    """0: it broke off before its end told."""


@dataclass
class Scene:
    """The services and the client; processes come and go."""

    model: Path
    folder: Path
    checkpoint: ServiceProcess
    settings: dict[str, object]
    sampler: SamplerProcess | None = None
    heard: list[Heard] = field(default_factory=list[Heard])
    refusals: set[str] = field(default_factory=set[str])

    async def publish(self, version: int) -> None:
        """Publish a version whole."""
        state = whole_state(self.model, factor=factor_of(version), base_model=str(self.model))
        async with open_channel(self.checkpoint.address) as channel:
            with acting_for(ALICE_SERVICE):
                await WeightClient(channel).publish_version(RUN, state, version=version)

    async def begin_to_publish(self, version: int, messages: int) -> None:
        """Have a trainer die in the middle of publishing a version."""
        arguments = (self.checkpoint.address, self.model, version, factor_of(version), messages)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, '-m', 'fixtures.whole_publisher'),
            *map(str, arguments),
            env={**os.environ, 'PYTHONPATH': f'{Path(__file__).parents[2]}:{os.environ.get("PYTHONPATH", "")}'},
        )
        assert await process.wait() == -signal.SIGKILL

    async def start_sampler(self, armed: str = '') -> SamplerProcess:
        """Start the next process of the sampler."""
        self.sampler = await SamplerProcess.start(self.folder / 'sampler', self.settings, armed=armed)
        return self.sampler

    async def restart_checkpoint(self) -> None:
        """Start the checkpoint service again, where it was."""
        self.checkpoint = await start_checkpoint(self.folder, self.checkpoint.address)

    async def answer(self, **wanted: int) -> Answer:
        """Return a greedy answer of the sampler that runs."""
        assert self.sampler is not None
        request = sample_request(ref(**wanted), base_model=str(self.model), params=PARAMS)
        return await read_answer(self.sampler.stub.Sample(request, metadata=ALICE))

    async def refusal(self, seconds: float = 0.05, **wanted: int) -> str:
        """Return the reason a request is refused with."""
        assert self.sampler is not None
        request = sample_request(ref(seconds, **wanted), base_model=str(self.model), params=PARAMS)
        return (await failure_of(self.sampler.stub.Sample(request, metadata=ALICE))).reason

    async def keep_asking(self) -> None:
        """Ask one question after the other, until cancelled."""
        async with grpc.aio.insecure_channel(str(self.settings['listen']), options=QUICK) as channel:
            stub = type(self.sampler.stub)(channel) if self.sampler else None
            assert stub is not None
            for seed in itertools.cycle(range(SEEDS)):
                params = {**PARAMS, 'temperature': 1.0, 'seed': seed}
                request = sample_request(ref(0.5), base_model=str(self.model), params=params)
                await self._ask(stub.Sample(request, metadata=ALICE))

    async def _ask(self, call: grpc.aio.UnaryStreamCall) -> None:
        heard = Heard()
        try:
            async for response in call:
                if response.HasField('delta'):
                    heard.tokens += numbers(response.delta.token_ids)
                    heard.logprobs += numbers(response.delta.logprobs)
                elif response.HasField('finished'):
                    ((span),) = response.finished.version_spans
                    heard.version = span.version
        except grpc.aio.AioRpcError as error:
            self.refusals.add(error.code().name)
        if heard.tokens:
            self.heard.append(heard)


PARAMS = {'temperature': 0.0, 'max_tokens': TOKENS}
QUICK = (('grpc.initial_reconnect_backoff_ms', 50), ('grpc.max_reconnect_backoff_ms', 200))
"""A client that comes back soon after its server has."""


async def start_checkpoint(folder: Path, address: str) -> ServiceProcess:
    """Start the checkpoint service there."""
    return await ServiceProcess.start(folder, f'listen={address}', 'telemetry.log_level=ERROR')


@asynccontextmanager
async def staged(folder: Path, model: Path) -> AsyncIterator[Scene]:
    """Yield a scene with the checkpoint service; whatever runs at the end is killed."""
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
    scene = Scene(model, folder, checkpoint, settings)
    try:
        yield scene
    finally:
        if scene.sampler is not None:
            await scene.sampler.kill()
        await scene.checkpoint.kill()


@asynccontextmanager
async def asking(scene: Scene) -> AsyncIterator[None]:
    """Have the client ask within this block."""
    task = asyncio.create_task(scene.keep_asking())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


def check_whole(answer: Answer, version: int, oracle: Oracle) -> None:
    """Hold an answer to a version."""
    assert answer.spans == [[(version, 0, TOKENS)]]
    assert answer.logprobs[0] == pytest.approx(oracle.scores(version, tuple(answer.tokens[0])), rel=0, abs=CLOSE)


def check_heard(scene: Scene, oracle: Oracle, versions: Sequence[int]) -> None:
    """Hold all that the client heard to one version each: the one that was named, or any where it broke off."""
    assert scene.heard
    for heard in scene.heard:
        tokens = tuple(heard.tokens)
        possible = [heard.version] if heard.version else versions
        assert any(
            heard.logprobs == pytest.approx(oracle.scores(version, tokens), rel=0, abs=CLOSE) for version in possible
        )
    assert {heard.version for heard in scene.heard} - {0} <= set(versions)


def places(model: Path) -> list[str]:
    """Return where a sampler dies at its second replacement: around it, and at its first, middle and last weight."""
    count = len(load_file(model / 'model.safetensors'))
    middle = [f'replacement.tensor={count + place}' for place in (2, count // 2, count)]
    return ['replacement.staged=2', 'replacement.begun=2', *middle, 'replacement.done=2', 'replacement.served=2']


async def test_a_mixture_would_be_noticed(tiny_llama_dir: Path) -> None:
    """Half of one version and half of the other scores unlike both; so does the model as it was loaded."""
    oracle, tokens = Oracle(tiny_llama_dir), tuple(range(50, 50 + TOKENS))
    count = len(load_file(tiny_llama_dir / 'model.safetensors'))
    wrong = [oracle.mixture(1, 2, place) for place in (1, count // 2, count - 1)] + [TorchSampler(str(tiny_llama_dir))]
    for sampler in wrong:
        for version in (1, 2):
            mine, its = scores_of(sampler, tokens), oracle.scores(version, tokens)
            assert max(abs(one - other) for one, other in zip(mine, its, strict=True)) > FAR


async def test_killed_in_a_replacement_it_comes_back_with_a_whole_version(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Wherever it dies, what is answered before, meanwhile and after is the old version's or the new one's."""
    oracle = Oracle(tiny_llama_dir)
    async with staged(tmp_path, tiny_llama_dir) as scene:
        await scene.publish(1)
        old = 1
        for place in places(tiny_llama_dir):
            process = await scene.start_sampler(place)
            check_whole(await scene.answer(at_least=old), old, oracle)
            async with asking(scene):
                await scene.publish(old + 1)
                await process.until_dead()
            old += 1
        await scene.start_sampler()
        check_whole(await scene.answer(at_least=old), old, oracle)
        assert await scene.refusal(exact=old - 1) == 'VERSION_NOT_FOUND'
    assert old == 1 + len(places(tiny_llama_dir))
    check_heard(scene, oracle, range(1, old + 1))


async def test_without_the_checkpoint_service_it_does_not_answer_from_what_it_loaded(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """Both die in the middle: the sampler that comes back alone refuses, and then serves what was published."""
    oracle = Oracle(tiny_llama_dir)
    middle = places(tiny_llama_dir)[3]
    async with staged(tmp_path, tiny_llama_dir) as scene:
        await scene.publish(1)
        process = await scene.start_sampler(middle)
        check_whole(await scene.answer(at_least=1), 1, oracle)
        async with asking(scene):
            await scene.publish(2)
            await process.until_dead()
            await scene.checkpoint.kill()
            await scene.start_sampler()
            assert await scene.refusal() == 'VERSION_NOT_READY'
            await scene.restart_checkpoint()
            check_whole(await scene.answer(at_least=2), 2, oracle)
    check_heard(scene, oracle, (1, 2))
    assert 'UNAVAILABLE' in scene.refusals


async def test_what_a_killed_trainer_left_half_sent_is_no_version(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Trainer and sampler die: what comes back is exactly the old version, until the new one is published whole."""
    oracle = Oracle(tiny_llama_dir)
    async with staged(tmp_path, tiny_llama_dir) as scene:
        await scene.publish(1)
        process = await scene.start_sampler()
        check_whole(await scene.answer(at_least=1), 1, oracle)
        async with asking(scene):
            await scene.begin_to_publish(2, messages=8)
            await process.kill()
            await scene.start_sampler()
            check_whole(await scene.answer(at_least=1), 1, oracle)
            assert await scene.refusal(at_least=2) == 'VERSION_NOT_READY'
            await scene.publish(2)
            check_whole(await scene.answer(at_least=2), 2, oracle)
    check_heard(scene, oracle, (1, 2))
    assert 'UNAVAILABLE' in scene.refusals
