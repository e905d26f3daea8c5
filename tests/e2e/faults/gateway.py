"""A Tinker SDK program whose gateway is killed, or runs out of disk space, at seeded times."""

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tinker

from e2e.faults.schedule import DEATHS
from fixtures.faulty_service import fill_disk
from fixtures.tinker_sdk import new_model, running_stack, scores, service_client, tokens_of, train
from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackError, StackState, revive_stack
from twinkle_client.stack.state import ServiceState

_LIMIT_SECONDS = 240
"""Time limit for a program. The SDK's own limit is shorter, so a program that exceeds this limit hangs."""
_FULL_DISK_PROBABILITY = 0.3
"""Probability that a fault is a full disk instead of a kill."""
_EXAMPLES = [tokens_of(seed) for seed in range(3)]
_PROMPT = tinker.ModelInput.from_ints(tokens_of(9, 8))
_PARAMS = tinker.SamplingParams(max_tokens=5, seed=1, stop=[])


@dataclass(frozen=True)
class Outcome:
    """Results of a program."""

    losses: tuple[float, ...]
    logprobs: tuple[float, ...]
    """Log-probabilities of the examples with the final weights."""
    saved: tuple[float, ...]
    """Log-probabilities of the examples with the final checkpoint, loaded in another session."""
    sampled: tuple[tuple[int, ...], ...]
    """Tokens sampled in the middle of the training and at the end."""


@dataclass
class KillReport:
    """Results of all seeds."""

    violations: dict[int, str] = field(default_factory=dict[int, str])
    """Violations by seed."""
    seed_count: int = 0
    kill_count: int = 0
    full_disk_count: int = 0

    def __str__(self) -> str:
        faults = f'{self.kill_count} kills of the gateway, {self.full_disk_count} full disks'
        return f'{len(self.violations)} of {self.seed_count} programs, {faults}'


class GatewayKills:
    """Runs the program once without faults, and once per seed with kills and full disks of the gateway.

    Args:
        stack: Running stack, whose gateway is restarted after each kill.
    """

    def __init__(self, stack: StackState) -> None:
        self._stack = stack
        begin = time.monotonic()
        self.expected = run_session(stack)
        self._seconds = time.monotonic() - begin

    def run(self, seeds: Iterable[int]) -> KillReport:
        """Run the program for each seed, and report differences from the run without faults.

        If the gateway cannot be restarted or a program hangs, this violation is the last one, because the stack cannot
        run further seeds.
        """
        report = KillReport()
        for seed in seeds:
            report.seed_count += 1
            try:
                outcome = self._run_with_faults(random.Random(seed), report)
            except (StackError, TimeoutError) as error:
                report.violations[seed] = f'{type(error).__name__}: {error}; the remaining seeds were not run'
                return report
            except Exception as error:  # noqa: BLE001 (every exception of the program is a violation)
                report.violations[seed] = f'{type(error).__name__}: {error}'
                continue
            if differences := _differences(outcome, self.expected):
                report.violations[seed] = differences
        return report

    def _run_with_faults(self, rng: random.Random, report: KillReport) -> Outcome:
        times = sorted(rng.uniform(0, self._seconds) for _ in range(rng.randint(1, 3)))
        begin = time.monotonic()
        program = _start_session(self._stack)
        for fault_time in times:
            if _is_done(program, begin + fault_time - time.monotonic()):
                break
            if rng.random() < _FULL_DISK_PROBABILITY:
                report.full_disk_count += 1
                fill_disk(self._gateway().pid)
            else:
                report.kill_count += 1
                self._kill(rng.choice(DEATHS))
        return program.result(_LIMIT_SECONDS)

    def _gateway(self) -> ServiceState:
        state = StackState.load(self._stack.state_dir)
        assert state is not None
        return next(service for service in state.services if service.name == 'gateway')

    def _kill(self, death: signal.Signals) -> None:
        gateway = self._gateway()
        os.kill(gateway.pid, death)
        while gateway.is_running():
            pass
        revive_stack(self._stack.state_dir, report=lambda *_, **__: None)


def run_session(stack: StackState) -> Outcome:
    """Train in a session, save, continue from the checkpoint, and sample."""
    with service_client(stack) as client:
        model = new_model(client, stack)
        losses = train(model, *_EXAMPLES, steps=3)
        early = _sample(model.save_weights_and_get_sampling_client().result())
        path = model.save_state('half').result().path
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        losses += train(resumed, *_EXAMPLES, steps=3)
        late = _sample(resumed.save_weights_and_get_sampling_client().result())
        final = scores(resumed, *_EXAMPLES)
        last = resumed.save_state('last').result().path
    with service_client(stack) as client:
        saved = scores(client.create_training_client_from_state(last).result(), *_EXAMPLES)
    return Outcome(tuple(losses), tuple(final.tolist()), tuple(saved.tolist()), (early, late))


def _start_session(stack: StackState) -> Future[Outcome]:
    """Run `run_session` in a daemon thread, which does not prevent the end of this process if the program hangs."""
    result = Future[Outcome]()

    def run() -> None:
        try:
            result.set_result(run_session(stack))
        except BaseException as error:  # noqa: BLE001 (the caller receives every exception)
            result.set_exception(error)

    threading.Thread(target=run, name='tinker-program', daemon=True).start()
    return result


def run_seeds(folder: Path, seeds: Iterable[int]) -> KillReport:
    """Start a stack, and run all seeds on it."""
    # The SDK logs every lost connection, but lost connections are expected here.
    logging.getLogger('tinker').setLevel(logging.CRITICAL)
    model = build_tiny_model(folder / 'model', family='qwen3')
    with running_stack(folder / 'stack', model) as stack:
        return GatewayKills(stack).run(seeds)


def _sample(sampler: tinker.SamplingClient) -> tuple[int, ...]:
    return tuple(sampler.sample(_PROMPT, 1, _PARAMS).result().sequences[0].tokens)


def _is_done(program: Future[Any], seconds: float) -> bool:
    """Wait at most `seconds`; return whether the program has finished."""
    return bool(wait([program], timeout=max(seconds, 0.0)).done)


def _differences(actual: Outcome, expected: Outcome) -> str:
    if actual == expected:
        return ''
    distance = np.abs(np.subtract(actual.logprobs, expected.logprobs)).max()
    return f'final log-probabilities differ by {distance:.3g}; {actual} instead of {expected}'
