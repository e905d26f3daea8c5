"""Unit tests of `Tracker` and `open_tracker`: checks, failing and slow backends, and the end of a run."""

import logging
import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from twinkle.component import MissingLibrary
from twinkle.tracking import TRACKERS, TrackedRun, Tracker, open_tracker
from twinkle.tracking.backends.packages import required
from twinkle.tracking.delivery import Delivery


class FakeBackend:
    """A backend that records calls. It can fail at given steps, and can wait in every log call until it is released."""

    def __init__(self, name: str = 'fake', *, failing_steps: tuple[int, ...] = (), is_blocked: bool = False) -> None:
        self.name = name
        self.failing_steps = failing_steps
        self.released = threading.Event()
        self.entered = threading.Event()
        if not is_blocked:
            self.released.set()
        self.run: TrackedRun | None = None
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.statuses: list[str] = []

    def start(self, run: TrackedRun) -> None:
        """Record the run; step -1 fails here."""
        if -1 in self.failing_steps:
            raise ConnectionError('no connection')
        self.run = run

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Record the values, after the backend is released."""
        self.entered.set()
        self.released.wait()
        if step in self.failing_steps:
            raise ConnectionError(f'lost at {step}')
        self.logged.append((step, dict(values)))

    def finish(self, status: str) -> None:
        """Record the status."""
        self.statuses.append(status)


def test_values_of_all_libraries_reach_every_backend():
    """Python, NumPy and torch numbers reach each backend as floats, in the order of the calls."""
    backends = [FakeBackend('a'), FakeBackend('b')]
    with open_tracker(backends, project='p', run_id='r') as tracker:
        tracker.log({'int': 3, 'bool': True, 'decimal': Decimal('0.5'), 'inf': -math.inf}, step=np.int32(4))
        tracker.log({'numpy': np.float16(1.5), 'torch': torch.tensor([2.5], requires_grad=True)}, step=5)
    expected = [(4, {'int': 3.0, 'bool': 1.0, 'decimal': 0.5, 'inf': -math.inf}), (5, {'numpy': 1.5, 'torch': 2.5})]
    for backend in backends:
        assert backend.logged == expected
        assert {type(value) for _, values in backend.logged for value in values.values()} == {float}
        assert backend.statuses == ['finished']
        assert backend.run == TrackedRun(run_id='r', project='p', name='r', config={})


@pytest.mark.parametrize(
    ('values', 'step', 'problem'),
    [
        ({'loss': 1.0, 'text': '1.5'}, 0, r"values\['text'\]: expected a number, got str"),
        ({'loss': None}, 0, r"values\['loss'\]: expected a number, got NoneType"),
        ({'loss': np.zeros(2)}, 0, r"values\['loss'\]: expected a number, got ndarray"),
        ({'loss': torch.zeros(2)}, 0, r"values\['loss'\]: expected a number, got Tensor"),
        ({'loss': 1 + 2j}, 0, r"values\['loss'\]: expected a number, got complex"),
        ({1: 1.0}, 0, 'names must be strings, got 1'),
        ({'my loss': 1.0}, 0, "'my loss' is not a valid name"),
        ({'a/../b': 1.0}, 0, 'not a valid name'),
        ({'_private': 1.0}, 0, 'not a valid name'),
        ({'x' * 129: 1.0}, 0, 'not a valid name'),
        ({'step': 1.0}, 0, "'step' is reserved; choose another name, such as train/step"),
        ({'loss': 1.0}, -1, r'step: must be from 0 to 2\^53 - 1, got -1'),
        ({'loss': 1.0}, 2**53, 'step: must be'),
        ({'loss': 1.0}, 1.0, 'integer'),
    ],
)
def test_invalid_values_are_refused_before_any_backend_receives_them(values: Any, step: Any, problem: str):
    """The error for a value, name or step that a backend could not store names it; the call stores nothing."""
    backend = FakeBackend()
    with open_tracker([backend]) as tracker, pytest.raises((TypeError, ValueError), match=problem):
        tracker.log(values, step=step)
    assert backend.logged == []


@pytest.mark.parametrize(
    ('options', 'problem'),
    [
        ({'project': 'a/b'}, "project: must have 1 to 64 letters.*'a/b'"),
        ({'run_id': '.hidden'}, 'run_id: must have'),
        ({'name': ''}, 'name: must have 1 to 128 printable characters'),
        ({'tags': 'sft'}, "tags: expected a list of strings, got 'sft'"),
        ({'tags': ['sft', '']}, r'tags\[1\]: must have 1 to 64'),
        ({'config': 3}, 'config: expected a mapping, got int'),
        ({'config': {'a': {'b': [1, object()]}}}, r"config\['a'\]\['b'\]\[1\]: expected text.*got object; convert it"),
        ({'config': {'learning rate': 1}}, "config: 'learning rate' is not a valid name"),
        ({'notes': 'x'}, r"unknown options of a run \['notes'\]"),
    ],
)
def test_invalid_options_are_refused_before_a_backend_starts(options: Any, problem: str):
    """The error for an invalid description names the option."""
    backend = FakeBackend()
    with pytest.raises((TypeError, ValueError), match=problem):
        open_tracker([backend], **options)
    assert backend.run is None


def test_unknown_and_repeated_trackers_are_refused():
    """The error for an unknown name lists the known names, names are unique, and 'service' needs a run's metrics."""
    with pytest.raises(ValueError, match=r"unknown tracker 'wandbb'; did you mean wandb\? Known names: service, jsonl"):
        open_tracker('jsonl,wandbb')
    with pytest.raises(ValueError, match="'jsonl' is named twice"):
        open_tracker('jsonl, jsonl')
    with pytest.raises(ValueError, match='names a backend twice'):
        open_tracker([FakeBackend(), FakeBackend()])
    with pytest.raises(ValueError, match=r'metrics=model\.metrics\(\)'):
        open_tracker('service')


@pytest.mark.parametrize('name', ['trackio', 'wandb', 'mlflow', 'tensorboard'])
def test_a_missing_package_is_refused_with_the_command_that_installs_it(name: str, tmp_path):
    """A tracker that is not installed is refused immediately, and its files are not created."""
    assert name in TRACKERS
    with pytest.raises(MissingLibrary, match=rf"{name} is not installed; run: pip install 'twinkle-grpc\[tracking-"):
        open_tracker(['jsonl', name], folder=tmp_path / 'runs')
    assert not (tmp_path / 'runs').exists()


def test_a_folder_with_the_name_of_a_tracker_is_no_package(tmp_path, monkeypatch):
    """A folder of output files, which Python would import as an empty package, counts as a missing package."""
    (tmp_path / 'outputs_of_a_tracker').mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingLibrary):
        required('outputs_of_a_tracker')


def test_no_backend_is_a_valid_choice():
    """A tracker without backends checks values and stores nothing."""
    with open_tracker() as tracker:
        tracker.log({'loss': 1.0}, step=0)
        with pytest.raises(TypeError):
            tracker.log({'loss': None}, step=1)
    assert tracker.lost_counts == {}


class FakeMetrics:
    """Store of the metrics of a run in the services."""

    run_id = 'ad-7'

    def __init__(self) -> None:
        self.points: dict[tuple[str, int], float] = {}

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Store values."""
        self.points |= {(name, step): value for name, value in values.items()}


def test_the_store_of_the_services_is_the_default_with_metrics():
    """Values of a run in the services are stored there by default, and all backends use the run's id."""
    metrics, other = FakeMetrics(), FakeBackend()
    with open_tracker(metrics=metrics) as tracker:
        tracker.log({'loss': 1.0}, step=3)
    assert metrics.points == {('loss', 3): 1.0}
    with open_tracker(['service', other], metrics=metrics, name='sft') as tracker:
        tracker.log({'loss': 2.0}, step=3)
    assert (metrics.points, other.logged) == ({('loss', 3): 2.0}, [(3, {'loss': 2.0})])
    assert other.run is not None
    assert (other.run.run_id, other.run.name) == ('ad-7', 'sft')


def test_a_failing_backend_does_not_affect_others(caplog: pytest.LogCaptureFixture):
    """An error of a backend is counted and causes a warning; its later values are sent, and other backends continue."""
    failing, healthy = FakeBackend('failing', failing_steps=(1, 2)), FakeBackend('healthy')
    with caplog.at_level(logging.WARNING), open_tracker([failing, healthy]) as tracker:
        for step in range(4):
            tracker.log({'loss': step}, step=step)
    assert [step for step, _ in failing.logged] == [0, 3]
    assert [step for step, _ in healthy.logged] == [0, 1, 2, 3]
    assert tracker.lost_counts == {'failing': 2, 'healthy': 0}
    assert [record.getMessage() for record in caplog.records] == [
        'tracker failing lost the values of step 1, training continues: ConnectionError: lost at 1',
        'tracker failing lost 2 log calls',
    ]
    assert failing.statuses == healthy.statuses == ['finished']


def test_a_backend_without_response_delays_only_the_end(caplog: pytest.LogCaptureFixture):
    """`log` does not wait for a backend; `finish` waits for a limited time and reports the lost values."""
    hanging, healthy = FakeBackend('hanging', is_blocked=True), FakeBackend('healthy')
    with caplog.at_level(logging.WARNING), open_tracker([hanging, healthy], finish_timeout=0.05) as tracker:
        for step in range(100):
            tracker.log({'loss': step}, step=step)
        hanging.entered.wait()
    assert len(healthy.logged) == 100
    assert tracker.lost_counts == {'hanging': 100, 'healthy': 0}
    assert caplog.records[0].getMessage() == 'tracker hanging did not end its run in time; unsent log calls: 100'
    hanging.released.set()


def test_values_above_the_capacity_are_lost(caplog: pytest.LogCaptureFixture):
    """A backend that is slower than the program has a bounded queue, and further values are lost."""
    backend = FakeBackend(is_blocked=True)
    delivery = Delivery(backend, capacity=3)
    with caplog.at_level(logging.WARNING):
        delivery.log({'loss': 0.0}, step=0)
        backend.entered.wait()
        for step in range(1, 6):
            delivery.log({'loss': 0.0}, step=step)
        assert delivery.lost_count == 2
        backend.released.set()
        delivery.close('finished')
        delivery.join(60.0)
    assert [step for step, _ in backend.logged] == [0, 1, 2, 3]
    assert '3 log calls are waiting' in caplog.records[0].getMessage()


def test_an_error_while_a_backend_opens_ends_the_others():
    """An error at a start is raised with the tracker's name, and runs that are already open are marked as failed."""
    opened, refused = FakeBackend('opened'), FakeBackend('refused', failing_steps=(-1,))
    with pytest.raises(ConnectionError, match='no connection') as caught:
        open_tracker([opened, refused], run_id='r')
    assert caught.value.__notes__ == ["tracker 'refused' could not open run 'r'"]
    assert opened.statuses == ['failed']


@pytest.mark.parametrize(
    ('error', 'status'),
    [
        (ValueError('broken'), 'failed'),
        (KeyboardInterrupt(), 'interrupted'),
        (SystemExit(1), 'failed'),
        (SystemExit(0), 'finished'),
        (SystemExit(), 'finished'),
    ],
)
def test_the_status_follows_the_error_of_the_block(error: BaseException, status: str):
    """An error, Ctrl-C and `sys.exit` end the run with their status after all values are stored."""
    backend = FakeBackend()
    with suppress(BaseException), open_tracker([backend]) as tracker:
        tracker.log({'loss': 1.0}, step=0)
        raise error
    assert (backend.logged, backend.statuses) == ([(0, {'loss': 1.0})], [status])


def test_a_run_ends_once():
    """Finishing again has no effect, and logging to an ended run is refused."""
    backend = FakeBackend()
    tracker = Tracker(TrackedRun(run_id='r', project='p', name='r', config={}), [backend])
    tracker.finish('failed')
    tracker.finish()
    assert backend.statuses == ['failed']
    with pytest.raises(RuntimeError, match="run 'r' has ended"):
        tracker.log({'loss': 1.0}, step=0)


def test_an_error_at_the_end_of_a_run_is_a_warning(caplog: pytest.LogCaptureFixture):
    """A backend that cannot end its run does not make a finished training fail."""

    class Unfinished(FakeBackend):
        def finish(self, status: str) -> None:
            raise TimeoutError(f'cannot store {status}')

    with caplog.at_level(logging.WARNING), open_tracker([Unfinished()]) as tracker:
        tracker.log({'loss': 1.0}, step=0)
    assert caplog.records[0].getMessage() == 'tracker fake did not end its run: TimeoutError: cannot store finished'
