"""Budgets for the numbers of files and functions that a call enters in all processes.

A small number means that an engineer can follow the call; a budget must not be raised. Each warm flow is recorded
several times, and only functions in all recordings count. Functions that idle processes enter (leases, feeds,
heartbeats) are subtracted. These functions differ between runs and machines, so the numbers vary by a few. After a
call, the gateway copies the changed run from a feed at an arbitrary time; the functions of this copy are subtracted by
name.
"""

import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import tinker

from fixtures.flow_hook.sitecustomize import FlowRecorder
from fixtures.source_tree import ROOT
from fixtures.tinker_sdk import SDK_MARKS, new_model, running_stack, service_client, tokens_of, weighted
from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.rpc.loop import LoopThread
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), *SDK_MARKS]
BUDGETS = {
    'forward_backward': (118, 463),
    'sampled_token': (95, 383),
    'published_version': (117, 424),
    'tinker_future': (137, 614),
}
"""Maximum numbers of files and functions per flow. The goals are 90, 70, 100 and 110 files."""
SLACK_FILES = 25
"""A budget must be lowered if it exceeds its flow's number of files by this number."""
QUIET_READS = 12
"""A flow is complete after this number of reads, 0.1 s apart, without new functions."""
RECORDINGS = 3
"""Number of recordings of each flow."""
MOST_RECORDINGS = 10
"""Maximum number of recordings if a flow exceeds its budget: calls on a busy machine enter a few more functions."""
SESSIONS = {'heartbeat_interval': 600, 'session_lifetime': 1200}
"""Settings of the gateway, in seconds, with which no client heartbeat occurs during a recording."""
IDLE_READS = 150
"""Number of reads without new functions of an idle stack; leases and heartbeats must be renewed during these reads."""
FEATURE = {'input_ids': [5, 6, 7, 8], 'labels': [6, 7, 8, -100]}
FEED = frozenset(
    {
        ('twinkle_services/gateway/catalogue/follow.py', 'FeedFollower._copy'),
        ('twinkle_services/gateway/catalogue/follow.py', 'FeedFollower._follow'),
        ('twinkle_services/gateway/catalogue/follow.py', 'FeedFollower.run'),
        ('twinkle_services/gateway/catalogue/grpc.py', 'entry_events'),
        ('twinkle_services/gateway/catalogue/sql.py', 'SqlRunStore.save'),
        ('twinkle_services/gateway/store/base.py', 'SqlStore._put'),
    }
)
"""Functions that copy a changed run into the gateway's catalogue."""
Entered = frozenset[tuple[str, str]]


@pytest.fixture(scope='module', autouse=True)
def _collect_sdk_connections() -> Iterator[None]:
    """Free the SDK's open connections at the end of this module, whose marks ignore the resulting warnings."""
    yield
    gc.collect()


@dataclass(frozen=True)
class Recording:
    """Access to the folder in which all processes record their calls."""

    folder: Path

    def record(self, window: str, flow: Callable[[], object], *, quiet_reads: int = QUIET_READS) -> Entered:
        """Run `flow` until all processes are idle; return the path and name of every function entered."""
        (self.folder / 'window').write_text(window)
        self._wait_until_quiet(window, 5)
        flow()
        return self._wait_until_quiet(window, quiet_reads)

    def _wait_until_quiet(self, window: str, quiet_reads: int) -> Entered:
        pause, written, unchanged = threading.Event(), frozenset[tuple[Path, int]](), 0
        while unchanged < quiet_reads:
            pause.wait(0.1)
            found = frozenset((file, file.stat().st_mtime_ns) for file in self.folder.glob(f'{window}-*.json'))
            unchanged = unchanged + 1 if found == written else 0
            written = found
        return frozenset((path, function) for file, _ in written for path, function in json.loads(file.read_text()))


@pytest.fixture(scope='module')
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """Recording of this process and of every process that it starts."""
    folder = tmp_path_factory.mktemp('flows')
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv('TWINKLE_FLOW_DIR', str(folder))
        hook = str(ROOT / 'tests' / 'fixtures' / 'flow_hook')
        environment.setenv('PYTHONPATH', os.pathsep.join([hook, os.environ.get('PYTHONPATH', '')]))
        recorder = FlowRecorder(folder)
        recorder.start()
        _on_client_thread(recorder.record_thread)
        yield Recording(folder)
    threading.setprofile(None)
    sys.setprofile(None)
    _on_client_thread(partial(sys.setprofile, None))


def _on_client_thread(function: Callable[[], None]) -> None:
    """Run a function on the thread of all clients, which an earlier test may have started."""

    async def run() -> None:
        function()

    LoopThread().run(run())


@pytest.fixture(scope='module')
def stack(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Running stack whose processes record their calls."""
    del recording
    model = build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')
    with running_stack(tmp_path_factory.mktemp('stack'), model, gateway=SESSIONS) as state:
        yield state


@pytest.fixture(scope='module')
def flows(recording: Recording, stack: StackState) -> dict[str, Entered]:
    """Functions that each flow enters, without those that an idle stack enters."""
    with TwinkleClient(stack.address, stack.read_api_key()) as client, service_client(stack) as service:
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        model.add_adapter_to_model('flow', LoraConfig(r=4, seed=1))
        sampler, sdk_model = Sampler(stack.base_model, client=client), new_model(service, stack)

        def sample() -> None:
            sampler.sample('Hello', {'max_tokens': 1, 'temperature': 0.0}, 'flow', version=version)

        def resolve_future() -> tinker.ForwardBackwardOutput:
            return sdk_model.forward_backward([weighted(tokens_of(1))], 'cross_entropy').result()

        version = model.publish_version()
        calls: dict[str, Callable[[], object]] = {
            'forward_backward': lambda: model.forward_backward([FEATURE]),
            'sampled_token': sample,
            'published_version': model.publish_version,
            'tinker_future': resolve_future,
        }
        for call in calls.values():
            call()
        # A quarter of a second later, the checkpoint service writes the version to disk in the background.
        model.publish_version()
        idle = recording.record('idle', lambda: None, quiet_reads=IDLE_READS) | FEED
        rounds = [_recorded(recording, calls, number) for number in range(RECORDINGS)]
        while len(rounds) < MOST_RECORDINGS and any(
            _exceeds_budget(name, entered) for name, entered in _common(rounds, idle).items()
        ):
            rounds.append(_recorded(recording, calls, len(rounds)))
        return _common(rounds, idle)


def _recorded(recording: Recording, calls: dict[str, Callable[[], object]], number: int) -> dict[str, Entered]:
    """Record each flow once.

    Each round starts with a different flow. Otherwise, a flow would be recorded at regular intervals, and periodic work
    with the same interval, such as a heartbeat, could occur in all its recordings.
    """
    names = list(calls)
    first = number % len(names)
    return {name: recording.record(f'{name}_{number}', calls[name]) for name in names[first:] + names[:first]}


def _common(rounds: list[dict[str, Entered]], idle: Entered) -> dict[str, Entered]:
    """Return the functions that each flow entered in all rounds, without those of an idle stack."""
    return {name: frozenset.intersection(*(entered[name] for entered in rounds)) - idle for name in BUDGETS}


def _exceeds_budget(name: str, entered: Entered) -> bool:
    max_files, max_functions = BUDGETS[name]
    return len(_files(entered)) > max_files or len(entered) > max_functions


def _files(entered: Entered) -> frozenset[str]:
    return frozenset(path for path, _ in entered)


@pytest.mark.parametrize('name', BUDGETS)
def test_flow_stays_within_its_budget(
    name: str, flows: dict[str, Entered], record_property: Callable[[str, object], None]
) -> None:
    """A warm call enters no more files and functions than its budget, and nearly as many files as the budget allows."""
    files, functions = len(_files(flows[name])), len(flows[name])
    record_property('files', files)
    record_property('functions', functions)
    entered = '\n'.join(sorted(f'{path} {function}' for path, function in flows[name]))
    assert not _exceeds_budget(name, flows[name]), f'{files} files and {functions} functions:\n{entered}'
    assert files > BUDGETS[name][0] - SLACK_FILES
