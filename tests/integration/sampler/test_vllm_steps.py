"""The effect of loading adapters on running streams, counted in steps of vLLM's engine core."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fixtures.published import Published, serving_both
from fixtures.sampler_engines import make_vllm_engine
from fixtures.sampler_service import Answer, ints, read_answer, sample_request, tenant
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.sampler.ports import SamplerEngine

pytestmark = [pytest.mark.asyncio(loop_scope='session'), pytest.mark.timeout(300)]

STREAMS, VERSIONS, TOKENS = 32, 30, 40


@pytest_asyncio.fixture(scope='module', loop_scope='session')
async def logged_engine(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple]:
    """An engine that logs its steps and has fewer slots than versions, and the path of its log."""
    from twinkle.sampler.vllm.step_log import SCHEDULER  # noqa: PLC0415 (slow import)

    path = tmp_path_factory.mktemp('steps') / 'steps.jsonl'
    engine = await make_vllm_engine(
        tiny_llama_dir, max_num_seqs=STREAMS, scheduler_cls=SCHEDULER, additional_config={'step_log': str(path)}
    )
    yield engine, path
    await engine.close()


async def sample(running: Published, seed: int) -> Answer:
    """Continue a prompt with the newest version."""
    request = sample_request(
        sampling_pb2.AdapterRef(adapter_id='ad-1'),
        prompt=sampling_pb2.Prompt(token_ids=ints([1, 40 + seed % 32, 42])),
        params={'max_tokens': TOKENS, 'seed': seed},
    )
    return await read_answer(running.sampler.stub.Sample(request, metadata=tenant('alice')))


@pytest.mark.slow
async def test_no_running_stream_misses_a_step_while_versions_are_loaded(
    logged_engine: tuple[SamplerEngine, Path], tmp_path: Path
) -> None:
    """A sequence gets one token in every step from its first to its last token, and no sequence is preempted."""
    from twinkle.sampler.vllm.step_log import read_steps  # noqa: PLC0415 (slow import)

    engine, path = logged_engine
    answers: list[Answer] = []
    async with serving_both(engine, tmp_path, max_resident_versions=8) as running:
        await running.publish(1)
        is_done, is_sample_finished = asyncio.Event(), asyncio.Event()

        async def sample_on(stream: int) -> None:
            while not is_done.is_set():
                answers.append(await sample(running, STREAMS * len(answers) + stream))
                is_sample_finished.set()

        streams = [asyncio.create_task(sample_on(stream)) for stream in range(STREAMS)]
        for version in range(2, VERSIONS + 1):
            await running.publish(version)
            is_sample_finished.clear()
            await is_sample_finished.wait()
        is_done.set()
        await asyncio.gather(*streams)
    steps = list(read_steps(path))
    gaps = [gap for step in steps for gap in step.steps_since.values()]
    assert all(answer.reasons == [sampling_pb2.STOP_REASON_LENGTH] for answer in answers)
    assert len({answer.spans[0][0][0] for answer in answers}) > VERSIONS // 3
    assert sum(map(len, (step.steps_since for step in steps))) == TOKENS * len(answers)
    assert not any(step.preempted for step in steps)
    # A 0 is a first token, which has no earlier step.
    assert set(gaps) == {0, 1}
    assert gaps.count(0) == len(answers)
