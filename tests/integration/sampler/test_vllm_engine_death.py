"""If the engine core exits or hangs, every waiting call fails."""

import asyncio
import signal
from contextlib import aclosing, suppress
from pathlib import Path

import psutil
import pytest

from fixtures.sampler_engines import VLLM_ARGUMENTS, need_vllm
from twinkle.data_format import SamplingParams
from twinkle.sampler.errors import EngineFailed

pytestmark = [pytest.mark.asyncio(loop_scope='session'), pytest.mark.timeout(300)]

LIMIT_SECONDS = 120
"""Timeout that only a hanging call reaches."""


def cores_except(others: set[psutil.Process]) -> list[psutil.Process]:
    """Return the processes of an engine, without Python's resource tracker, which the next engine needs."""
    found = []
    for process in set(psutil.Process().children(recursive=True)) - others:
        with suppress(psutil.NoSuchProcess):
            if 'resource_tracker' not in ' '.join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
async def test_hanging_core_is_killed_and_its_readers_get_an_error(tmp_path: Path, tiny_llama_dir: Path):
    """A core that is stopped during a request is detected and killed, and the request fails."""
    need_vllm()
    from twinkle.sampler.vllm import VllmEngine, VllmRequest  # noqa: PLC0415 (slow import)

    async def read() -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
        request = VllmRequest(request_id='one', prompt_token_ids=(1, 40, 41), params=params)
        async with aclosing(engine.generate(request)) as events:
            async for _ in events:
                has_begun.set()

    others = set(psutil.Process().children(recursive=True))
    engine = await asyncio.to_thread(VllmEngine, str(tiny_llama_dir), VLLM_ARGUMENTS, hang_seconds=15.0)
    has_begun = asyncio.Event()
    try:
        reading = asyncio.create_task(read())
        await asyncio.wait_for(has_begun.wait(), LIMIT_SECONDS)
        cores = cores_except(others)
        for process in cores:
            process.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(reading, LIMIT_SECONDS)
        await asyncio.wait_for(engine.wait_until_failed(), LIMIT_SECONDS)
    finally:
        await asyncio.wait_for(engine.close(), LIMIT_SECONDS)
    assert not any(process.is_running() for process in cores)


@pytest.mark.slow
async def test_every_call_fails_after_the_core_exits(tmp_path: Path, tiny_llama_dir: Path):
    """If the core exits, a request that waits during a pause, an update of the base model and later calls fail."""
    need_vllm()
    from twinkle.sampler.vllm import VllmEngine, VllmRequest, folder_tensors  # noqa: PLC0415 (slow import)

    def request(name: str) -> VllmRequest:
        params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
        return VllmRequest(request_id=name, prompt_token_ids=(1, 40, 41), params=params)

    async def read(name: str) -> None:
        async with aclosing(engine.generate(request(name))) as events:
            async for _ in events:
                has_begun.set()

    others = set(psutil.Process().children(recursive=True))
    engine = await asyncio.to_thread(VllmEngine, str(tiny_llama_dir), VLLM_ARGUMENTS)
    has_begun = asyncio.Event()
    tensors = folder_tensors(str(tiny_llama_dir))
    try:
        await engine.replace_base(tensors, version=1)
        waiting = asyncio.create_task(read('waiting'))
        await asyncio.wait_for(has_begun.wait(), LIMIT_SECONDS)
        await engine.pause()
        for process in cores_except(others):
            process.send_signal(signal.SIGKILL)
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(waiting, LIMIT_SECONDS)
        await asyncio.wait_for(engine.wait_until_failed(), LIMIT_SECONDS)
        for call in (engine.replace_base(tensors, version=2), engine.resume(), read('after')):
            with pytest.raises(EngineFailed):
                await asyncio.wait_for(call, LIMIT_SECONDS)
    finally:
        await asyncio.wait_for(engine.close(), LIMIT_SECONDS)
