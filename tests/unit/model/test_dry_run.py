"""Tests of the dry run: exact sizes, measured memory, and time as the sum of its terms."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle.model.dry_run import PROBE_COUNT, BatchShape, CostModel, Probe, available_bytes, full_size, lora_size
from twinkle.model.dry_run.cost_model import Coefficients
from twinkle.model.dry_run.live_bytes import peak_bytes
from twinkle.model.dry_run.other_load import ProcessorTimes, parse_stat
from twinkle.model.engine import TrainerEngine
from twinkle.nn import PackedCausalLM, UnknownTargetModules

ADAMW = {'optimizer': 'AdamW', 'options': {}}


@pytest.fixture
def engine(tmp_path: Path) -> TrainerEngine:
    """Trainer of a tiny model."""
    return TrainerEngine(PackedCausalLM.load(build_tiny_model(tmp_path)))


@pytest.mark.parametrize('pattern', [{}, {'q_proj': 2}])
def test_size_equals_the_adapter(engine: TrainerEngine, pattern: dict[str, int]) -> None:
    """The parameter count equals that of an adapter, and the size covers float32 weights and two moments."""
    config = LoraConfig(r=4, rank_pattern=pattern, seed=0)
    size = lora_size(engine.model.layers, config, **ADAMW)
    state = engine.create_adapter('real', config)
    assert size.parameter_count == state.weights.parameter_count
    assert size.persistent_bytes == 3 * 4 * size.parameter_count


@pytest.mark.parametrize(('name', 'copies'), [('SGD', 0), ('AdamW', 2), ('Adagrad', 1)])
def test_optimizer_state_is_measured(name: str, copies: int) -> None:
    """The optimizer state has no float32 value per parameter for SGD, two for AdamW and one for Adagrad."""
    assert full_size([1000], optimizer=name, options={}).optimizer_bytes == copies * 4000


def test_unknown_layers_are_refused(engine: TrainerEngine) -> None:
    """The size of an adapter with unknown target layers is refused."""
    with pytest.raises(UnknownTargetModules):
        lora_size(engine.model.layers, LoraConfig(target_modules=['nothing']), **ADAMW)


def test_probe_leaves_no_adapter(engine: TrainerEngine) -> None:
    """A probe leaves no additional adapter, and a larger batch has a higher estimated peak."""
    engine.create_adapter('other', LoraConfig(r=4))
    probe = Probe(engine, max_pass_tokens=1024)
    for _ in range(PROBE_COUNT):
        assert not probe.is_done
        probe.step()
    assert probe.is_done
    assert engine.adapter_ids == ('other',)
    model, size = probe.cost_model(), lora_size(engine.model.layers, LoraConfig(r=4), **ADAMW)
    small = model.estimate(size, BatchShape(batch_size=1, sequence_tokens=64))
    large = model.estimate(size, BatchShape(batch_size=8, sequence_tokens=64))
    assert small.peak_bytes < large.peak_bytes
    assert small.adapter_bytes == large.adapter_bytes == size.persistent_bytes


def test_peak_counts_live_tensors(engine: TrainerEngine) -> None:
    """The peak counts new tensors until they are freed, and does not count views or existing tensors."""
    existing = torch.zeros(1000)
    with peak_bytes(engine.model.device) as peak:
        one = existing + 1.0
        existing.view(10, 100).t()
        del one
        two = torch.cat([existing, existing])
        del two
    assert peak.value == 8000


def test_batches_are_divided_into_passes() -> None:
    """Memory is estimated for the largest pass; time is estimated for all passes and the step."""
    flat = Coefficients({'pass': 1.0, 'rows': 0.1}, 0.0)
    model = CostModel(
        time=flat, memory=flat, memory_by_parameter=0.0, step_seconds_by_parameter=0.5, max_pass_tokens=100
    )
    size = full_size([2], optimizer='SGD', options={'lr': 0.1})
    cost = model.estimate(
        lora_size({'x': (1, 1)}, LoraConfig(r=1), optimizer='SGD', options={'lr': 0.1}),
        BatchShape(batch_size=5, sequence_tokens=40),
    )
    assert size.parameter_count == 2
    assert cost.pass_count == 3
    assert cost.step_seconds == pytest.approx(3 * 1.0 + 0.1 * 200 + 0.5 * 2)
    assert cost.peak_bytes == round(16 + 1.0 + 0.1 * 80)


def test_processor_times_are_parsed() -> None:
    """The busy time excludes idle time and waits for disks; guests' times are contained in other times."""
    second = os.sysconf('SC_CLK_TCK')
    times = [10, 1, 5, 80, 4, 0, 0, 2, 7, 7]
    text = f'cpu  {" ".join(str(second * value) for value in times)}\ncpu0 1 1 1 1 1 1 1 1 1 1\n'
    assert parse_stat(text) == (102, 18)
    assert parse_stat('cpu') == (0, 0)


def test_load_of_other_processes_is_measured() -> None:
    """The processor time of a child process counts as other load, and the share of it is at most 1."""
    begin = ProcessorTimes.now()
    subprocess.run([sys.executable, '-c', 'import time\nwhile time.process_time() < 0.5: pass'], check=True)
    used = ProcessorTimes.now() - begin
    assert used.busy - used.own > 0.3
    assert 0 < used.other_share <= 1
    assert ProcessorTimes(total=4.0, busy=3.0, own=2.0).other_share == 0.25
    assert ProcessorTimes(total=4.0, busy=1.0, own=2.0).other_share == 0.0
    assert ProcessorTimes(total=0.0, busy=0.0, own=2.0).other_share == 0.0


def test_available_memory_is_plausible() -> None:
    """The available memory is positive and below a pebibyte."""
    assert 0 < available_bytes() < 1 << 50
