"""Memory, threads, descriptors and disk usage of every service while adapters and clients are created and removed.

Each tenant has a client process that creates, trains, publishes, samples, saves and deletes adapters without a pause.
At regular intervals a random client is killed without ending its session, and a new client replaces it.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from matplotlib.figure import Figure

from benchmarks.local_stack import connected, running_stack
from benchmarks.processes import with_children
from twinkle_client.administration import KeyAdministration
from twinkle_client.stack import StackState
from twinkle_client.stack.options import DEFAULT_MODEL

QUANTITIES = {'memory': 'MiB', 'threads': '', 'descriptors': '', 'disk': 'MiB'}
"""Measured quantities and their units."""
_MIB = 1 << 20
_SHARED_MEMORY = '/dev/shm'  # noqa: S108 (only its usage is measured)


@dataclass
class _Client:
    """The client process of a tenant."""

    process: subprocess.Popen[bytes]
    key: str
    log: Path


@dataclass
class _Record:
    """Measurements by quantity and service, with their times in seconds from the start."""

    times: list[float] = field(default_factory=list[float])
    values: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {name: {} for name in QUANTITIES})

    def add(self, seconds: float, stack: StackState) -> None:
        """Measure all services."""
        self.times.append(seconds)
        for service in stack.services:
            tree = with_children(service.pid)
            numbers = {
                'memory': sum(process.memory_info().rss for process in tree) / _MIB,
                'threads': sum(process.num_threads() for process in tree),
                'descriptors': sum(process.num_fds() for process in tree),
                'disk': _folder_bytes(stack.state_dir / 'data' / service.name) / _MIB,
            }
            for name, number in numbers.items():
                self.values[name].setdefault(service.name, []).append(number)
        shared = psutil.disk_usage(_SHARED_MEMORY).used / _MIB
        self.values['disk'].setdefault('shared memory', []).append(shared)


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the load and return the figures."""
    options = _parse(arguments)
    record, kills = _Record(), 0
    with running_stack(options.model, engine=options.engine) as stack, ExitStack() as cleanup:
        clients = [_start(stack, options.model, number, key) for number, key in enumerate(_make_keys(stack, options))]
        cleanup.callback(_stop, clients)
        begin = time.monotonic()
        next_kill, numbers = options.kill_seconds, random.Random(0)
        while (seconds := time.monotonic() - begin) < 60 * options.minutes:
            record.add(seconds, stack)
            print(f'churn: {seconds:.0f} s, {len(_cycles(clients))} cycles', file=sys.stderr, flush=True)
            if seconds >= next_kill:
                next_kill, kills = next_kill + options.kill_seconds, kills + 1
                _replace(numbers.choice(clients), stack, options.model, seed=kills)
            time.sleep(options.interval)
        cycles = _cycles(clients)
    if options.plot:
        _plot(record, Path(options.plot))
    return {'options': vars(options), **_figures(record), **_figures_of_cycles(cycles), 'killed_clients': kills}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='./run bench churn')
    parser.add_argument('--model', default=DEFAULT_MODEL, help='hub id, alias or folder')
    parser.add_argument('--engine', default='auto', help='sampling engine: auto, vllm or torch')
    parser.add_argument('--minutes', type=float, default=5.0, help='duration of the load')
    parser.add_argument('--tenants', type=int, default=3, help='number of tenants, with one client each')
    parser.add_argument('--kill-seconds', type=float, default=60.0, help='seconds between two kills of a client')
    parser.add_argument('--interval', type=float, default=10.0, help='seconds between two measurements')
    parser.add_argument('--plot', default='', help='path of a PNG with the measurements')
    return parser.parse_args(arguments)


def _make_keys(stack: StackState, options: argparse.Namespace) -> list[str]:
    with connected(stack) as client:
        keys = KeyAdministration(client=client)
        names = [f'tenant-{number}' for number in range(options.tenants)]
        return [keys.create_key(name, scopes=['train', 'sample'])[1] for name in names]


def _start(stack: StackState, base_model: str, number: int, key: str) -> _Client:
    log = stack.state_dir / f'churn-{number}.jsonl'
    log.touch()
    return _Client(_start_process(stack, base_model, number, key, log), key, log)


def _start_process(stack: StackState, base_model: str, seed: int, key: str, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, '-m', 'benchmarks.churn_worker', stack.address, base_model, str(seed), str(log)]
    environment = {**os.environ, 'TWINKLE_API_KEY': key}
    return subprocess.Popen(command, env=environment)


def _replace(client: _Client, stack: StackState, base_model: str, *, seed: int) -> None:
    """Kill a client, so that its session is abandoned, and start another client with the same key."""
    _stop([client])
    client.process = _start_process(stack, base_model, seed, client.key, client.log)


def _stop(clients: Sequence[_Client]) -> None:
    for client in clients:
        client.process.kill()
        client.process.wait()


def _cycles(clients: Sequence[_Client]) -> list[dict[str, Any]]:
    # The last line of a killed client may be incomplete.
    lines = [line for client in clients for line in client.log.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith('}\n')]


def _folder_bytes(folder: Path) -> int:
    """Return the size of the files in a folder; files that are deleted during the call are ignored."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(path) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def _figures(record: _Record) -> dict[str, Any]:
    """Compare the last quarter of the time with the second quarter; the first quarter includes the warm-up."""
    quarter = max(1, len(record.times) // 4)
    return {
        name: {
            service: {
                'second_quarter': round(statistics.mean(numbers[quarter : 2 * quarter] or numbers), 1),
                'last_quarter': round(statistics.mean(numbers[-quarter:]), 1),
                'most': round(max(numbers), 1),
            }
            for service, numbers in by_service.items()
        }
        for name, by_service in record.values.items()
    }


def _figures_of_cycles(cycles: Sequence[dict[str, Any]]) -> dict[str, Any]:
    outcomes = Counter(cycle['outcome'] for cycle in cycles)
    seconds = sorted(cycle['seconds'] for cycle in cycles) or [0.0]
    return {
        'cycles': len(cycles),
        'outcomes': dict(outcomes),
        'cycle_seconds': {'p50': round(statistics.median(seconds), 2), 'most': round(seconds[-1], 2)},
    }


def _plot(record: _Record, path: Path) -> None:
    """Plot each quantity over time in a separate panel, with a line per service."""
    figure = Figure(figsize=(15, 3.6))
    axes = figure.subplots(1, len(QUANTITIES))
    minutes = [seconds / 60 for seconds in record.times]
    for axis, (name, unit) in zip(axes, QUANTITIES.items(), strict=True):
        for service, numbers in record.values[name].items():
            axis.plot(minutes, numbers, label=service)
        axis.set_title(f'{name} ({unit})' if unit else name)
        axis.set_xlabel('minutes')
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize='small')
    axes[-1].legend(fontsize='small')
    figure.tight_layout()
    figure.savefig(path, dpi=110)
