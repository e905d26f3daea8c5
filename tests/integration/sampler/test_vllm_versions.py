"""Versions published while streams run, through the real checkpoint service, on the torch engine and on vLLM."""

import asyncio
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
LONG = [3 + (5 * place) % 250 for place in range(80)]
"""More than two blocks of vLLM's prefix cache."""
CLOSE, FAR = 1e-3, 0.1
"""The same version's log-probabilities are closer than CLOSE: strong adapters make more of float32's rounding than
those of the contract suite, which holds 1e-4. Another version's differ by more than FAR somewhere in an answer."""
GREEDY = {'temperature': 0.0}


@pytest.fixture(scope='module')
def oracle(tiny_llama_dir: Path) -> VersionOracle:
    """What each version's weights say."""
    return VersionOracle(PackedCausalLM.load(tiny_llama_dir))


def adapter(**fields: Any) -> sampling_pb2.AdapterRef:
    """Return a reference to the adapter of these tests."""
    return sampling_pb2.AdapterRef(**{'adapter_id': 'ad-1', **fields})


def long_request(reference: sampling_pb2.AdapterRef | None, **params: Any) -> wire.SampleRequest:
    """Return a request whose prompt every stream shares."""
    return sample_request(
        reference, prompt=sampling_pb2.Prompt(token_ids=ints(LONG)), params={'max_tokens': TOKENS, **params}
    )


async def sample(running: Published, reference: sampling_pb2.AdapterRef | None = None, **params: Any) -> Answer:
    """Continue the long prompt."""
    return await read_answer(running.sampler.stub.Sample(long_request(reference, **params), metadata=ALICE))


def check(answer: Answer, oracle: VersionOracle) -> int:
    """Hold every token of an answer to the one version that its span names, and return that."""
    assert answer.reasons == [sampling_pb2.STOP_REASON_LENGTH]
    ((version, begin, end),) = answer.spans[0]
    assert (begin, end) == (0, TOKENS)
    mine, next_one = (oracle.score(number, LONG, answer.tokens[0]) for number in (version, version + 1))
    assert answer.logprobs[0] == pytest.approx(mine, rel=0, abs=CLOSE)
    assert answer.logprobs[0] != pytest.approx(next_one, rel=0, abs=FAR)
    return version


async def test_hundred_versions_disturb_no_stream(real_engine, oracle, tmp_path):
    """32 streams go on while 100 versions come: none ends early, and every token is its version's, cache or not."""
    async with serving_both(real_engine, tmp_path, max_resident_versions=6) as running:
        await running.publish(1)
        is_done, an_end = asyncio.Event(), asyncio.Event()

        async def sample_on(seed: int) -> list[Answer]:
            answers = []
            while not is_done.is_set():
                answers.append(await sample(running, adapter(), seed=1000 * seed + len(answers)))
                an_end.set()
            return answers

        streams = [asyncio.create_task(sample_on(seed)) for seed in range(STREAMS)]
        for version in range(2, VERSIONS + 1):
            await running.publish(version)
            if version % 20 == 0:
                # Versions come faster than samples end: without a wait all of them would belong to the first.
                an_end.clear()
                await an_end.wait()
        is_done.set()
        answers = [answer for stream in streams for answer in await stream]
        newest = await sample(running, adapter(at_least=VERSIONS))
    seen = {check(answer, oracle) for answer in answers}
    assert len(answers) >= STREAMS
    assert len(seen) > 1
    assert check(newest, oracle) == VERSIONS


async def test_versions_beyond_every_limit_stay_themselves(real_engine, oracle, tmp_path):
    """Nine versions on three places, of which vLLM computes two at once: each answers as its own weights do."""
    async with serving_both(real_engine, tmp_path, max_resident_versions=3) as running:
        for version in range(1, 10):
            await running.publish(version)
        for order in (range(1, 10), range(9, 0, -1)):
            answers = await asyncio.gather(*(sample(running, adapter(exact=version), **GREEDY) for version in order))
            assert [check(answer, oracle) for answer in answers] == list(order)


async def test_base_stays_the_base_in_a_crowd_of_versions(real_engine, oracle, tmp_path):
    """Requests without an adapter, beside more versions than slots, are answered by the base model alone."""
    async with serving_both(real_engine, tmp_path, max_resident_versions=4) as running:
        for version in range(1, 5):
            await running.publish(version)
        references = [adapter(exact=1 + place % 4) if place % 3 else None for place in range(24)]
        answers = await asyncio.gather(
            *(sample(running, reference, seed=place) for place, reference in enumerate(references))
        )
    found = [check(answer, oracle) for answer in answers]
    assert found == [reference.exact if reference else 0 for reference in references]


async def test_prefixes_are_found_again_within_a_version_only(vllm_engine, oracle, tmp_path):
    """The same prompt is cached for its version; the next version computes it anew."""
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
