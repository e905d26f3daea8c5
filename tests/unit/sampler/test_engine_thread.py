"""The engine's thread: a failed step affects only its requests, and a request without a reader is aborted."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch

from fixtures.engine_runs import make_engine
from twinkle.data_format import SamplingParams, StopReason
from twinkle.nn import PackedCausalLM
from twinkle.sampler.engine import TokenEvent
from twinkle_services.sampler.backends.engine_thread import EngineThread
from twinkle_services.sampler.backends.mailbox import Mailbox
from twinkle_services.sampler.domain.errors import EngineFailed

LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)


class FragileModel:
    """A model that fails on one token, as a kernel might."""

    def __init__(self, model: PackedCausalLM, *, failing_token: int) -> None:
        self._model = model
        self._failing_token = failing_token

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def hidden(self, input_ids: torch.Tensor, positions: torch.Tensor, **spans: object) -> torch.Tensor:
        """Run the model, or raise RuntimeError if the failing token is in the batch."""
        if (input_ids == self._failing_token).any():
            raise RuntimeError('broken')
        return self._model.hidden(input_ids, positions, **spans)


@pytest.fixture(scope='module')
def model(tiny_llama_dir: Path) -> PackedCausalLM:
    """A tiny model."""
    return PackedCausalLM.load(tiny_llama_dir)


async def begin(thread: EngineThread, name: str, prompt: list[int], params: SamplingParams, *, limit: int) -> Mailbox:
    """Begin a request and return its mailbox."""
    mailbox = Mailbox(asyncio.get_running_loop(), limit=limit)
    await thread.call(partial(thread.add, name, prompt, params, adapter=None, mailbox=mailbox))
    return mailbox


async def test_failed_step_fails_its_requests_only(model):
    """A failed step fails its requests and frees their memory; then the engine serves the next request."""
    thread = EngineThread(make_engine(FragileModel(model, failing_token=300)), stall_seconds=60)
    try:
        broken = await begin(thread, 'broken', [5, 300], LONG, limit=100)
        with pytest.raises(EngineFailed):
            await broken.take()
        short = SamplingParams(max_tokens=1, temperature=0)
        good = await begin(thread, 'good', [5], short, limit=100)
        events, _ = await good.take()
        assert events[-1].stop_reason is not None
        assert thread.engine.load.cache_bytes_reserved == 0
    finally:
        thread.close()


async def test_request_without_a_reader_is_aborted(model):
    """A request without a reader buffers a bounded number of events, and is aborted after the stall time."""
    thread = EngineThread(make_engine(model), stall_seconds=0.05)
    try:
        mailbox = await begin(thread, 'it', [5], LONG, limit=3)
        while not await thread.call(lambda: thread.engine.is_idle):
            assert mailbox.size <= 4
        events, was_full = await mailbox.take()
        assert was_full
        assert [event.stop_reason for event in events if isinstance(event, TokenEvent)][-1] is StopReason.ABORT
        assert len(events) <= 5
    finally:
        thread.close()


async def test_thread_stops_after_consecutive_failed_steps(model):
    """The thread stops after several consecutive failed steps, and later calls are refused."""
    thread = EngineThread(make_engine(FragileModel(model, failing_token=300)), stall_seconds=60)
    failing = asyncio.ensure_future(thread.wait_until_failed())
    while not failing.done():
        try:
            mailbox = await begin(thread, 'it', [5, 300], LONG, limit=100)
            await mailbox.take()
        except EngineFailed:
            continue
    with pytest.raises(EngineFailed):
        await thread.call(lambda: None)
    thread.close()


async def test_closed_engine_has_not_failed(model):
    """Closing the engine is not reported as a failure; later calls are refused."""
    thread = EngineThread(make_engine(model), stall_seconds=60)
    failing = asyncio.ensure_future(thread.wait_until_failed())
    thread.close()
    with pytest.raises(EngineFailed):
        await thread.call(lambda: None)
    assert not failing.done()
    failing.cancel()
