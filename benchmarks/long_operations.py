"""Delay of a tenant while another client runs operations of thousands of tokens, measured in passes of the trainer."""

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.co_batch import TOKEN_IDS, random_feature
from benchmarks.local_stack import connected, running_stack
from benchmarks.timing import Spread
from twinkle.data_format import InputFeature, LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.stack.options import DEFAULT_MODEL


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Measure a tenant alone, and while another client runs long operations; return the figures."""
    parser = argparse.ArgumentParser(prog='./run bench long_operations')
    parser.add_argument('--model', default=DEFAULT_MODEL, help='hub id, alias or folder')
    parser.add_argument('--tokens', type=int, default=12000, help='tokens of each long operation')
    parser.add_argument('--rounds', type=int, default=6)
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        state = stack.enter_context(running_stack(options.model))
        operator = stack.enter_context(connected(state))
        _, key = KeyAdministration(client=operator).create_key('other', scopes=['train'])
        other = stack.enter_context(TwinkleClient(state.address, key))
        busy = MultiLoraTransformersModel(options.model, client=operator)
        busy.add_adapter_to_model('long', LoraConfig(r=8, seed=1))
        examples = [random_feature(TOKEN_IDS, 200, index) for index in range(options.tokens // 200)]
        pass_seconds = _pass_seconds(busy, examples)
        alone = _delays(other, options.model, rounds=options.rounds)
        with _repeated(busy, examples):
            # Wait until the first operation runs a pass.
            time.sleep(pass_seconds / 2)
            beside = _delays(other, options.model, rounds=options.rounds)
    return {
        'tokens': options.tokens,
        'pass_seconds': round(pass_seconds, 3),
        'goal': 'at most 2 passes longer',
        **{name: _figures(alone[name], beside[name], pass_seconds) for name in alone},
    }


def _pass_seconds(model: MultiLoraTransformersModel, examples: Sequence[InputFeature]) -> float:
    """Return the mean duration in seconds of a pass of a long operation that runs alone."""
    model.forward_backward(examples[:10], adapter_name='long', return_logps=False)
    begin = time.perf_counter()
    result = model.forward_backward(examples, adapter_name='long', return_logps=False)
    return (time.perf_counter() - begin) / result['receipt']['pass_count']


@contextmanager
def _repeated(model: MultiLoraTransformersModel, examples: Sequence[InputFeature]) -> Iterator[None]:
    """Run long operations, one after the other, while the block runs."""
    is_done = threading.Event()

    def run() -> None:
        while not is_done.is_set():
            model.forward_backward(examples, adapter_name='long', return_logps=False)

    thread = threading.Thread(target=run, name='long-operations')
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _delays(client: TwinkleClient, base_model: str, *, rounds: int) -> dict[str, Spread]:
    """Return the durations of creating an adapter and of its first step on 64 tokens, one per round."""
    model = MultiLoraTransformersModel(base_model, client=client)
    creations, steps = list[float](), list[float]()
    for index in range(rounds):
        begin = time.perf_counter()
        model.add_adapter_to_model('short', LoraConfig(r=8, seed=index))
        created = time.perf_counter()
        model.forward_backward([random_feature(TOKEN_IDS, 64, index)], adapter_name='short', return_logps=False)
        model.clip_grad_and_step(adapter_name='short')
        creations.append(created - begin)
        steps.append(time.perf_counter() - created)
        model.remove_adapter('short')
    return {'create_adapter': Spread(tuple(creations)), 'step_of_64_tokens': Spread(tuple(steps))}


def _figures(alone: Spread, beside: Spread, pass_seconds: float) -> dict[str, Any]:
    return {
        'median_delay_in_passes': round((beside.median - alone.median) / pass_seconds, 2),
        'most_delay_in_passes': round((max(beside.seconds) - alone.median) / pass_seconds, 2),
        'alone': alone.as_figures(),
        'beside': beside.as_figures(),
    }
