"""kill -9 of vLLM's engine core in a complete stack, in the middle of a response that a client reads at the gateway."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest

from fixtures.sampler_engines import VLLM_ARGUMENTS, need_vllm
from fixtures.tiny_model import build_tiny_model
from twinkle_client import TwinkleClient
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackOptions, StackState, revive_stack, start_stack, stop_stack

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PARAMS = {'max_tokens': 300, 'ignore_eos': True, 'seed': 7}
PROMPT = {'input_ids': [5, 6, 7]}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StackState]:
    """A running stack whose only sampler runs vLLM."""
    need_vllm()
    options = StackOptions(
        state_dir=tmp_path / 'stack',
        base_model=str(build_tiny_model(tmp_path / 'tiny')),
        engine='vllm',
        # On a busy machine, vLLM needs more time to start than a response waits by default.
        services={'sampler': {'vllm': {'engine_args': VLLM_ARGUMENTS}}, 'gateway': {'fleet': {'replica_wait': 120}}},
    )
    state = start_stack(options, report=_silent)
    try:
        yield state
    finally:
        stop_stack(state.state_dir, report=_silent)


def _kill_core(sampler_pid: int) -> None:
    """Kill all processes of the engine, which leaves the sampler's process to notice it."""
    for process in psutil.Process(sampler_pid).children(recursive=True):
        if 'resource_tracker' not in ' '.join(process.cmdline()):
            process.send_signal(signal.SIGKILL)


def test_response_continues_after_the_engine_core_is_killed(stack: StackState) -> None:
    """The sampler ends when its engine core is killed, and the response continues after the delivered tokens."""
    sampler_pid = next(item.pid for item in stack.services if item.name == 'sampler')
    begun = Event()

    tokens: list[int] = []

    def read() -> list[int]:
        for delta in sampler.sample_stream(PROMPT, PARAMS):
            tokens.extend(delta.tokens)
            if len(tokens) > 5:
                begun.set()
        return tokens

    with TwinkleClient(stack.address, stack.read_api_key()) as client, ThreadPoolExecutor(1) as pool:
        sampler = Sampler(stack.base_model, client=client)
        undisturbed = list(sampler.sample(PROMPT, PARAMS)[0].sequences[0].tokens)
        reading = pool.submit(read)
        assert begun.wait(60)
        _kill_core(sampler_pid)
        delivered = len(tokens)
        psutil.Process(sampler_pid).wait(60)
        revived = revive_stack(stack.state_dir, report=_silent)
        assert revived is not None
        found = reading.result(120)
        # vLLM continues a response with another sample of the same distribution.
        assert (len(found), found[:delivered]) == (PARAMS['max_tokens'], undisturbed[:delivered])
        assert list(sampler.sample(PROMPT, PARAMS)[0].sequences[0].tokens) == undisturbed


def _silent(service: str, event: str) -> None:
    del service, event
