"""Components in Ray workers behave as in the program's own process."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures import ray_program
from fixtures.tiny_model import build_tiny_model
from fixtures.torchrun import run_ranks
from twinkle.infra.runtime import runtime, use_runtime
from twinkle.infra.workers.worker import Worker, WorkerSettings

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope='module')
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results that the program on Ray has written, by name."""
    directory = tmp_path_factory.mktemp('ray')
    model_dir, results = build_tiny_model(directory / 'model', family='qwen3'), directory / 'results.json'
    done = run_ranks(ray_program.__file__, model_dir, results, count=1)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(results.read_text())


def test_trainer_in_workers_gives_the_digest_of_one_process(found: dict[str, Any]) -> None:
    """Two data-parallel workers, and two that share the frozen weights, give the results and weights of one process."""
    assert len(found['digests']) == 3
    assert len(set(found['digests'])) == 1


def test_samplers_in_workers_share_the_prompts(found: dict[str, Any]) -> None:
    """Two samplers return the completions that one sampler returns, in the order of the prompts."""
    assert len(found['tokens']) == 5
    assert found['remote_tokens'] == found['tokens']
    assert found['result_type'] == 'SampleResults'


def test_methods_divide_arguments_and_combine_results(found: dict[str, Any]) -> None:
    """Methods of a custom component run in both workers, as each method is configured."""
    assert found['added'] == [11, 12, 13]
    assert found['added_none'] == []
    assert found['total'] == {'total': 6}
    assert found['process_count'] == 2
    assert found['own_process'] is False


def test_properties_lengths_and_iterators_are_forwarded(found: dict[str, Any]) -> None:
    """Properties, `len` and generators give the values of the first worker."""
    assert (found['amount'], found['length'], found['items']) == (10, 3, [3, 2, 1])


def test_workers_pause_collections_for_their_first_component(found: dict[str, Any]) -> None:
    """A worker collects no garbage while it imports and creates its first component, and then excludes the imports."""
    assert found['collections'] == [[False, True, True], [True, True, True]]


def test_loader_in_a_worker_yields_whole_batches(found: dict[str, Any]) -> None:
    """A loader in a group yields every batch to the program, and keeps its position."""
    assert found['batches'] == [[[0, 1], [2, 3], [4, 5]], 3, 6]


def test_errors_reach_the_program_with_their_types(found: dict[str, Any]) -> None:
    """Errors of constructors and methods are raised in the program; unsuitable placements are refused."""
    refusals = found['refusals']
    assert refusals['constructor'] == 'ValueError: amount must be at least 0, got -1'
    assert refusals['group'].startswith("ValueError: Adder: unknown group 'absent'")
    assert "but group 'other' has 2" in refusals['mesh']
    assert refusals['axis'].startswith('NotSupportedYet: each worker of Adder is a replica')
    assert refusals['adapter'].startswith("UnknownAdapter: there is no adapter 'absent'")
    assert refusals['argument'].startswith('TypeError: missing a required argument')


def test_lost_worker_ends_its_group(found: dict[str, Any]) -> None:
    """A call during which a worker is killed raises WorkersLost, and later calls raise it too."""
    assert found['refusals']['crash'].startswith("WorkersLost: a worker of group 'other' ended")
    assert found['refusals']['after the crash'].startswith('WorkersLost')


def test_placement_report_lists_the_workers(found: dict[str, Any]) -> None:
    """The placement report has a line for each process, including the program, and marks lost groups."""
    assert 'model: 2 workers on cpu' in found['placement']
    assert found['placement'].count(' process ') == 3, 'there are not three processes: two workers and the program'
    assert 'lost' in found['placement'].partition('other: 2 workers')[2]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """A worker in this process."""
    before = runtime()
    yield Worker(WorkerSettings(folder=str(tmp_path / 'absent'), seed=1))
    use_runtime(before)
    gc.unfreeze()


def test_worker_collects_garbage_except_while_it_creates_its_first_component(worker: Worker) -> None:
    """A worker without a component collects garbage; a pause ends when the first component has been created."""
    assert gc.isenabled()
    worker.pause_collections()
    assert not gc.isenabled()
    worker.create(1, dict, ((), {}), {})
    assert gc.isenabled()
    worker.pause_collections()
    assert gc.isenabled()
