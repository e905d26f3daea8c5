"""Versions are published by a real checkpoint service while streams run, on the torch engine and on vLLM."""

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fixtures.published import Published, VersionOracle, serving_both
from fixtures.sampler_service import Answer, ints, read_answer, sample_request, tenant
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.nn import PackedCausalLM

pytestmark = [pytest.mark.asyncio(loop_scope='session'), pytest.mark.timeout(300)]

ALICE = tenant('alice')
STREAMS, VERSIONS, TOKENS = 32, 100, 24
LONG = [3 + (5 * index) % 250 for index in range(80)]
"""A prompt longer than two blocks of vLLM's prefix cache."""
CLOSE, FAR = 1e-3, 0.1
"""Log-probabilities of the same version differ by less than CLOSE. This is more than the 1e-4 of the contract suite,
because strong adapters amplify rounding errors. Those of another version differ by more than FAR for some token."""
GREEDY = {'temperature': 0.0}


@pytest.fixture(scope='module')
def oracle(tiny_llama_dir: Path) -> VersionOracle:
    """A reference that computes the log-probabilities under each version's weights."""
    return VersionOracle(PackedCausalLM.load(tiny_llama_dir))


def adapter(**fields: Any) -> sampling_pb2.AdapterRef:
    """Return a reference to the adapter of these tests."""
    return sampling_pb2.AdapterRef(**{'adapter_id': 'ad-1', **fields})


def long_request(reference: sampling_pb2.AdapterRef | None, **params: Any) -> wire.SampleRequest:
    """Return a request with a prompt that all streams share."""
    return sample_request(
        reference, prompt=sampling_pb2.Prompt(token_ids=ints(LONG)), params={'max_tokens': TOKENS, **params}
    )


async def sample(running: Published, reference: sampling_pb2.AdapterRef | None = None, **params: Any) -> Answer:
    """Continue the long prompt."""
    return await read_answer(running.sampler.stub.Sample(long_request(reference, **params), metadata=ALICE))


def check(answer: Answer, oracle: VersionOracle) -> int:
    """Check that all tokens of an answer belong to the version in its span, and return this version."""
    assert answer.reasons == [sampling_pb2.STOP_REASON_LENGTH]
    ((version, begin, end),) = answer.spans[0]
    assert (begin, end) == (0, TOKENS)
    expected, other = (oracle.score(number, LONG, answer.tokens[0]) for number in (version, version + 1))
    assert answer.logprobs[0] == pytest.approx(expected, rel=0, abs=CLOSE)
    assert answer.logprobs[0] != pytest.approx(other, rel=0, abs=FAR)
    return version


@pytest.mark.slow
async def test_hundred_versions_do_not_interrupt_streams(real_engine, oracle, tmp_path):
    """None of 32 streams ends early while 100 versions are published, and all tokens belong to the named version."""
    async with serving_both(real_engine, tmp_path, max_resident_versions=6) as running:
        await running.publish(1)
        is_done, is_sample_finished = asyncio.Event(), asyncio.Event()

        async def sample_on(seed: int) -> list[Answer]:
            answers = []
            while not is_done.is_set():
                answers.append(await sample(running, adapter(), seed=1000 * seed + len(answers)))
                is_sample_finished.set()
            return answers

        streams = [asyncio.create_task(sample_on(seed)) for seed in range(STREAMS)]
        for version in range(2, VERSIONS + 1):
            await running.publish(version)
            if version % 20 == 0:
                # Publishing is faster than sampling. Without a wait, all samples would belong to the first version.
                is_sample_finished.clear()
                await is_sample_finished.wait()
        is_done.set()
        answers = [answer for stream in streams for answer in await stream]
        newest = await sample(running, adapter(at_least=VERSIONS))
    seen = {check(answer, oracle) for answer in answers}
    assert len(answers) >= STREAMS
    assert len(seen) > 1
    assert check(newest, oracle) == VERSIONS


async def test_more_versions_than_slots_keep_their_weights(real_engine, oracle, tmp_path):
    """Nine versions, with three slots, each use their weights, although vLLM computes only two adapters at a time."""
    async with serving_both(real_engine, tmp_path, max_resident_versions=3) as running:
        for version in range(1, 10):
            await running.publish(version)
        for order in (range(1, 10), range(9, 0, -1)):
            answers = await asyncio.gather(*(sample(running, adapter(exact=version), **GREEDY) for version in order))
            assert [check(answer, oracle) for answer in answers] == list(order)


async def test_base_requests_use_the_base_model_with_many_versions(real_engine, oracle, tmp_path):
    """Requests without an adapter use the base model, even while other requests use four versions."""
    async with serving_both(real_engine, tmp_path, max_resident_versions=4) as running:
        for version in range(1, 5):
            await running.publish(version)
        references = [adapter(exact=1 + index % 4) if index % 3 else None for index in range(24)]
        answers = await asyncio.gather(
            *(sample(running, reference, seed=index) for index, reference in enumerate(references))
        )
    versions = [check(answer, oracle) for answer in answers]
    assert versions == [reference.exact if reference else 0 for reference in references]


async def test_prefixes_are_reused_within_a_version_only(vllm_engine, oracle, tmp_path):
    """A cached prompt is used again within its version, and not by the next version."""
    async with serving_both(vllm_engine, tmp_path, max_resident_versions=4) as running:
        cached = []
        for version in (1, 2):
            await running.publish(version)
            for _ in range(2):
                answer = await sample(running, adapter(at_least=version), **GREEDY)
                assert check(answer, oracle) == version
                cached.append(answer.prompt.cached_token_count)
        assert cached[0] == cached[2] == 0
        assert cached[1] == cached[3] > 0


@pytest.mark.usefixtures('vllm_engine')
async def test_sockets_and_files_of_vllm_are_in_a_private_folder():
    """The sockets of vLLM and the file for its workers are in a folder that only the user can enter."""
    with os.scandir(os.environ['VLLM_RPC_BASE_PATH']) as entries:
        kinds = {stat.S_IFMT(entry.stat().st_mode) for entry in entries}
    assert kinds == {stat.S_IFSOCK, stat.S_IFREG}
    assert stat.S_IMODE(os.stat(os.environ['VLLM_RPC_BASE_PATH']).st_mode) == stat.S_IRWXU  # noqa: PTH116
