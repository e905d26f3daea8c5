"""A program of the real Tinker SDK, and a gateway that is killed under it at moments that seeds choose."""

import logging
import os
import random
import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tinker

from fixtures.tinker_sdk import new_model, running_stack, scores, service_client, tokens_of, train
from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackState, revive_stack

_LIMIT_SECONDS = 240
"""A program that takes longer hangs: the SDK itself gives up sooner."""
_EXAMPLES = [tokens_of(seed) for seed in range(3)]
_PROMPT = tinker.ModelInput.from_ints(tokens_of(9, 8))
_PARAMS = tinker.SamplingParams(max_tokens=5, seed=1, stop=[])


@dataclass(frozen=True)
class Outcome:
    """What a program came to."""

    losses: tuple[float, ...]
    logprobs: tuple[float, ...]
    """What the final weights give to the examples."""
    saved: tuple[float, ...]
    """The same of what was saved last, loaded by another session."""
    drawn: tuple[tuple[int, ...], ...]
    """Tokens sampled on the way and at the end."""


@dataclass
class KillReport:
    """What came of some seeds."""

    violations: dict[int, str] = field(default_factory=dict[int, str])
    moments: dict[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    """When the gateway was killed, in seconds from the program's beginning."""

    def __str__(self) -> str:
        kills = sum(map(len, self.moments.values()))
        return f'{len(self.violations)} of {len(self.moments)} programs, {kills} kills of the gateway'


class GatewayKills:
    """Runs the program undisturbed, and again with the gateway killed under it."""

    def __init__(self, stack: StackState) -> None:
        """Use a running stack, whose gateway is started again after each kill."""
        self._stack = stack
        begin = time.monotonic()
        self.expected = run_session(stack)
        self._seconds = time.monotonic() - begin

    def run(self, seeds: Iterable[int]) -> KillReport:
        """Return what differs from the undisturbed program."""
        report = KillReport()
        for seed in seeds:
            moments = self._moments(seed)
            report.moments[seed] = moments
            try:
                seen = self._disturbed(moments)
            except Exception as error:  # noqa: BLE001 (whatever a program ends with is a violation)
                report.violations[seed] = f'{type(error).__name__}: {error}'
                continue
            if differences := _differences(seen, self.expected):
                report.violations[seed] = differences
        return report

    def _moments(self, seed: int) -> tuple[float, ...]:
        chance = random.Random(seed)
        return tuple(sorted(chance.uniform(0, self._seconds) for _ in range(chance.randint(1, 2))))

    def _disturbed(self, moments: tuple[float, ...]) -> Outcome:
        with ThreadPoolExecutor(1) as threads:
            begin = time.monotonic()
            program = threads.submit(run_session, self._stack)
            for moment in moments:
                if _is_done(program, begin + moment - time.monotonic()):
                    break
                self._kill()
            return program.result(_LIMIT_SECONDS)

    def _kill(self) -> None:
        state = StackState.load(self._stack.state_dir)
        assert state is not None
        gateway = next(service for service in state.services if service.name == 'gateway')
        os.kill(gateway.pid, signal.SIGKILL)
        while gateway.is_running():
            pass
        revive_stack(state.state_dir, report=lambda *_, **__: None)


def run_session(stack: StackState) -> Outcome:
    """Train in a session, save, go on from there, and sample, as any program of the SDK."""
    with service_client(stack) as client:
        model = new_model(client, stack)
        losses = train(model, *_EXAMPLES, steps=3)
        early = _draw(model.save_weights_and_get_sampling_client().result())
        path = model.save_state('half').result().path
        heir = client.create_training_client_from_state_with_optimizer(path).result()
        losses += train(heir, *_EXAMPLES, steps=3)
        late = _draw(heir.save_weights_and_get_sampling_client().result())
        final = scores(heir, *_EXAMPLES)
        last = heir.save_state('last').result().path
    with service_client(stack) as client:
        saved = scores(client.create_training_client_from_state(last).result(), *_EXAMPLES)
    return Outcome(tuple(losses), tuple(final.tolist()), tuple(saved.tolist()), (early, late))


def run_seeds(folder: Path, seeds: Iterable[int]) -> KillReport:
    """Return what came of the seeds on a stack of their own."""
    # A lost connection is what these rounds are about; the SDK tells of each.
    logging.getLogger('tinker').setLevel(logging.CRITICAL)
    model = build_tiny_model(folder / 'model', family='qwen3')
    with running_stack(folder / 'stack', model) as stack:
        return GatewayKills(stack).run(seeds)


def _draw(sampler: tinker.SamplingClient) -> tuple[int, ...]:
    return tuple(sampler.sample(_PROMPT, 1, _PARAMS).result().sequences[0].tokens)


def _is_done(program: Future[Any], seconds: float) -> bool:
    """Wait so long; return whether the program was done before."""
    return bool(wait([program], timeout=max(seconds, 0.0)).done)


def _differences(seen: Outcome, expected: Outcome) -> str:
    if seen == expected:
        return ''
    distance = np.abs(np.subtract(seen.logprobs, expected.logprobs)).max()
    return f'final log-probabilities differ by {distance:.3g}; {seen} instead of {expected}'
