"""Contract of `twinkle.tracking`: every backend stores the same scripted runs, which are read from its storage.

The trackers of other projects run in child processes that have the packages of requirements.txt on their path.
"""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fixtures.faulty_service import free_port
from fixtures.gateway_upstream import Upstream, adapter_event, wait_until
from fixtures.running_gateway import ADMIN_KEY, running_gateway
from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_model
from fixtures.tracked_runs import ANSWERS, CONFIG, PROJECT, RUNS, write_runs
from fixtures.tracker_files import StoredRun, read_jsonl
from twinkle_client import TwinkleClient
from twinkle_client.metrics import RunMetrics
from twinkle_client.rollouts import RolloutGroup, RunRollouts

PACKAGES = Path(sys.prefix) / 'tracking'
"""Folder into which `./run test --all` installs requirements.txt."""
FOREIGN = ('trackio', 'wandb', 'mlflow', 'tensorboard')
SHORT = {'steps': 2, 'pack-tokens': 64, 'held-out-packs': 2, 'evaluate-every': 2}
"""Options for a short run of a recipe."""
pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Stored:
    """All runs as one backend stored them."""

    tracker: str
    runs: dict[str, StoredRun]


@pytest.fixture(
    scope='module', params=['jsonl', 'service', *(pytest.param(name, marks=pytest.mark.slow) for name in FOREIGN)]
)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The scripted runs, written with one backend."""
    tracker, folder = request.param, tmp_path_factory.mktemp(request.param)
    if tracker == 'jsonl':
        write_runs(tracker, folder)
        return Stored(tracker, {run_id: read_jsonl(folder, PROJECT, run_id) for run_id in RUNS})
    if tracker == 'service':
        return Stored(tracker, asyncio.run(stored_by_a_gateway(folder)))
    return Stored(tracker, stored_by_a_child(tracker, folder))


async def stored_by_a_gateway(folder: Path) -> dict[str, StoredRun]:
    """Write the runs to the store of a gateway, and read them from it."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [adapter_event(run_id) for run_id in RUNS]
    async with upstream.serving(), running_gateway(folder, upstream=upstream.address) as gateway:
        client = TwinkleClient(gateway.address, ADMIN_KEY)
        await wait_until(client.list_training_runs.aio, lambda page: len(list(page)) == len(RUNS))
        stores = [partial(RunMetrics, client=client), partial(RunRollouts, client=client)]
        await asyncio.to_thread(write_runs, 'service', folder, *stores)
        runs: dict[str, StoredRun] = {}
        for run_id in RUNS:
            found = await RunMetrics(run_id, client=client).get.aio()
            points = {name: list(zip(series.steps, series.values, strict=True)) for name, series in found.items()}
            groups = await RunRollouts(run_id, client=client).list.aio()
            runs[run_id] = StoredRun(points=points, rollouts=[row for group in groups for row in rows_of(group)])
        await asyncio.to_thread(client.close)
    return runs


def rows_of(group: RolloutGroup) -> list[tuple[int, str, str, str, float, float]]:
    """Return the values of a group's rollouts."""
    return [
        (group.step, group.group_id, item.prompt_preview, item.completion_preview, item.reward or 0.0, *parts)
        for item in group.rollouts
        for parts in [item.reward_parts.values()]
    ]


def stored_by_a_child(
    tracker: str, folder: Path, *run: str, environment: Mapping[str, str] | None = None
) -> dict[str, StoredRun]:
    """Write and read the runs with another project's tracker in a child process; with `run`, only read this run."""
    program = [str(ROOT / 'tests' / 'fixtures' / 'tracked_runs.py'), tracker, str(folder), *run]
    printed = printed_by_a_child(program, folder, environment=environment)
    return {run_id: StoredRun(**stored) for run_id, stored in json.loads(printed.splitlines()[-1]).items()}


def printed_by_a_child(arguments: list[str], folder: Path, *, environment: Mapping[str, str] | None = None) -> str:
    """Run a Python program with the packages of all trackers but without their servers, and return its output."""
    if not (PACKAGES / '.installed').is_file():
        raise FileNotFoundError(f'{PACKAGES}: ./run test --all installs the trackers there')
    variables = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join(map(str, [PACKAGES, ROOT / 'sdk' / 'python', ROOT / 'tests', ROOT])),
        'HOME': str(folder),
        'WANDB_MODE': 'offline',
        'TRACKIO_DIR': str(folder / 'trackio'),
        'DO_NOT_TRACK': '1',
        **(environment or {}),
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def values_of(run: StoredRun, name: str) -> list[tuple[float, float]]:
    """Return the points of a metric. NaN becomes infinity, because NaN is not equal to itself."""
    return [(step, math.inf if math.isnan(value) else value) for step, value in run.points[name]]


def last_values(run: StoredRun, name: str) -> dict[float, float]:
    """Return the last stored value of each step."""
    return dict(values_of(run, name))


def test_every_number_is_stored_with_its_name_and_step(stored: Stored) -> None:
    """Python and NumPy numbers, NaN, names with separators, and several log calls for a step are stored."""
    run = stored.runs['plain']
    assert {name: values_of(run, name) for name in run.points} == {
        'train/loss': [(0, 1.25), (5, 1.0)],
        'train': [(0, 0.5)],
        'reward:mean': [(0, 3.0)],
        'nan': [(0, math.inf), (5, 2.5)],
    }


def test_rollouts_are_stored_with_their_rewards(stored: Stored) -> None:
    """Every backend except TensorBoard stores prompts, completions and rewards in the order of the call."""
    rollouts = [[5, '0000', '2 + 2?', answer, reward, 1.0] for answer, reward in zip(ANSWERS, (1.0, 0.0), strict=True)]
    found = stored.runs['plain'].rollouts
    assert (found and [list(row) for row in found]) == (None if stored.tracker == 'tensorboard' else rollouts)
    assert not stored.runs['resumed'].rollouts


def test_a_run_is_described(stored: Stored) -> None:
    """Name, tags and configuration are stored by every backend except the services' store."""
    run = stored.runs['plain']
    if stored.tracker == 'service':
        assert (run.name, run.tags, run.config) == (None, None, None)
        return
    config: dict[str, Any] = CONFIG
    if stored.tracker == 'mlflow':
        config = {'lr': '0.5', 'model': 'tiny', 'lora/rank': '8', 'lora/targets': "['q', 'v']", 'is_final': 'True'}
    assert (run.name, run.tags, run.config) == ('A plain run', ['one', 'two words'], config)


def test_a_run_with_the_same_id_is_continued(stored: Stored) -> None:
    """Points of both parts are stored; if a step is logged twice, the later value is last."""
    run = stored.runs['resumed']
    assert last_values(run, 'loss') == {0: 10, 1: 9, 2: 98, 3: 97, 4: 96, 5: 95}
    assert len(run.points['loss']) == (6 if stored.tracker == 'service' else 8)
    config = {'service': None, 'mlflow': {'lr': '0.5', 'added': '1'}}.get(stored.tracker, {'lr': 0.25, 'added': 1})
    assert run.config == config


def test_the_end_of_a_run_is_recorded(stored: Stored) -> None:
    """An error or Ctrl-C marks the run in backends that store a status, and the values remain."""
    statuses = [stored.runs[run_id].status for run_id in ('plain', 'resumed', 'broken', 'stopped')]
    expected: dict[str, list[str | None]] = {
        'jsonl': ['finished', 'finished', 'failed', 'interrupted'],
        'mlflow': ['finished', 'finished', 'failed', 'interrupted'],
        'wandb': ['finished', 'finished', 'failed', 'failed'],
    }
    assert statuses == expected.get(stored.tracker, [None] * 4)
    assert [values_of(stored.runs[run_id], 'loss') for run_id in ('broken', 'stopped')] == [[(0, 1.0)]] * 2


INTERRUPTED = """
import sys
from twinkle.tracking import open_tracker
with open_tracker('jsonl', folder=sys.argv[1], run_id='r') as tracker:
    for step in range(100):
        tracker.log({'loss': step}, step=step)
    print('running', flush=True)
    sys.stdin.read()
"""
"""Program that logs numbers and then waits for an interrupt."""


def test_ctrl_c_ends_the_run_and_keeps_its_values(tmp_path: Path) -> None:
    """A program that receives SIGINT writes all values, and marks its run as interrupted."""
    command = [sys.executable, '-c', INTERRUPTED, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == 'running\n'
        process.send_signal(signal.SIGINT)
        # The input is closed, because a signal just before the read would not interrupt the read.
        _, errors = process.communicate()
        assert 'KeyboardInterrupt' in errors
    run = read_jsonl(tmp_path, 'twinkle', 'r')
    assert run.status == 'interrupted'
    assert run.points['loss'] == [(step, step) for step in range(100)]


@pytest.mark.slow
def test_a_recipe_logs_its_curves_to_all_trackers(tmp_path: Path) -> None:
    """A recipe with `--track` stores the numbers of `curves.jsonl` and the setting in each tracker."""
    recipe = ['-m', 'examples.cookbook.pretraining', '--track', ','.join(FOREIGN), '--out', str(tmp_path)]
    options = {'model': build_tiny_model(tmp_path / 'model'), 'text': ROOT / 'docs', **SHORT}
    printed_by_a_child(
        [*recipe, *(part for name, value in options.items() for part in (f'--{name}', str(value)))], tmp_path
    )
    description = json.loads((tmp_path / 'curves.json').read_text())
    lines = [json.loads(line) for line in (tmp_path / 'curves.jsonl').read_text().splitlines()]
    losses = [(line['step'], line['loss']) for line in lines if 'loss' in line]
    assert len(losses) == 2
    assert (description['status'], description['config']['seed']) == ('finished', 0)
    for tracker in FOREIGN:
        (run,) = stored_by_a_child(tracker, tmp_path, description['project'], description['run_id']).values()
        assert run.name == 'pre-training'
        assert str((run.config or {})['pack_tokens']) == '64'
        assert last_values(run, 'loss') == pytest.approx(dict(losses), rel=1e-6)


BROKEN_DATABASE = """
import sqlite3, sys
from twinkle.tracking import open_tracker
with open_tracker('jsonl,mlflow', folder=sys.argv[1], run_id='r', project='contract') as tracker:
    with sqlite3.connect(sys.argv[1] + '/mlflow.db') as database:
        database.execute('DROP TABLE metrics')
    tracker.log({'loss': 1.0}, step=0)
    tracker.log({'loss': 0.5}, step=1)
print(tracker.lost_counts)
"""
"""Program whose second tracker fails in every log call."""


@pytest.mark.slow
def test_a_tracker_that_fails_during_training_does_not_stop_it(tmp_path: Path) -> None:
    """If MLflow refuses values, the program continues, counts them, and stores them with the other tracker."""
    printed = printed_by_a_child(['-c', BROKEN_DATABASE, str(tmp_path)], tmp_path)
    assert printed.splitlines()[-1] == "{'jsonl': 0, 'mlflow': 2}"
    assert read_jsonl(tmp_path, PROJECT, 'r').points == {'loss': [(0, 1.0), (1, 0.5)]}


@pytest.mark.slow
def test_values_for_an_unreachable_server_stay_on_this_machine(tmp_path: Path) -> None:
    """Trackio writes values to its local database while its server is unreachable, and the program continues."""
    server = {'TRACKIO_SERVER_URL': f'http://127.0.0.1:{free_port()}', 'TRACKIO_WRITE_TOKEN': 'token'}
    runs = stored_by_a_child('trackio', tmp_path, environment=server)
    assert last_values(runs['plain'], 'train/loss') == {0: 1.25, 5: 1.0}
