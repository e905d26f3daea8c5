"""The dry run: sizes are exact, memory is what tensors take, time adds up as its terms say."""

from pathlib import Path

import pytest
import torch

from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle.model.dry_run import PROBE_COUNT, BatchShape, CostModel, Probe, available_bytes, full_size, lora_size
from twinkle.model.dry_run.cost_model import Coefficients
from twinkle.model.dry_run.live_bytes import peak_bytes
from twinkle.model.engine import TrainerEngine
from twinkle.nn import PackedCausalLM, UnknownTargetModules

ADAMW = {'optimizer': 'AdamW', 'options': {}}


@pytest.fixture
def engine(tmp_path: Path) -> TrainerEngine:
    """A tiny model."""
    return TrainerEngine(PackedCausalLM.load(build_tiny_model(tmp_path)))


@pytest.mark.parametrize('pattern', [{}, {'q_proj': 2}])
def test_size_is_that_of_the_adapter_that_is_made(engine: TrainerEngine, pattern: dict[str, int]) -> None:
    """Parameters and optimizer state are counted as the engine then holds them."""
    config = LoraConfig(r=4, rank_pattern=pattern, seed=0)
    size = lora_size(engine.model.layers, config, **ADAMW)
    state = engine.create_adapter('real', config)
    assert size.parameter_count == state.weights.parameter_count
    assert size.resting_bytes == 3 * 4 * size.parameter_count


@pytest.mark.parametrize(('name', 'copies'), [('SGD', 0), ('AdamW', 2), ('Adagrad', 1)])
def test_optimizer_state_is_measured(name: str, copies: int) -> None:
    """What an optimizer keeps for each parameter is found by asking it."""
    assert full_size([1000], optimizer=name, options={}).optimizer_bytes == copies * 4000


def test_unknown_layers_are_refused(engine: TrainerEngine) -> None:
    """A plan names layers as an adapter would."""
    with pytest.raises(UnknownTargetModules):
        lora_size(engine.model.layers, LoraConfig(target_modules=['nothing']), **ADAMW)


def test_probe_leaves_nothing_behind(engine: TrainerEngine) -> None:
    """After the measurements the engine is as before, and a larger batch costs more of everything."""
    engine.create_adapter('mine', LoraConfig(r=4))
    probe = Probe(engine, max_pass_tokens=1024)
    for _ in range(PROBE_COUNT):
        assert not probe.is_done
        probe.step()
    assert probe.is_done
    assert engine.adapter_ids == ('mine',)
    model, size = probe.cost_model(), lora_size(engine.model.layers, LoraConfig(r=4), **ADAMW)
    small = model.estimate(size, BatchShape(batch_size=1, sequence_tokens=64))
    large = model.estimate(size, BatchShape(batch_size=8, sequence_tokens=64))
    assert small.peak_bytes < large.peak_bytes
    assert small.adapter_bytes == large.adapter_bytes == size.resting_bytes


def test_peak_follows_what_lives(engine: TrainerEngine) -> None:
    """Tensors count from when they are made until they are freed; views and given tensors do not count."""
    given = torch.zeros(1000)
    with peak_bytes(engine.model.device) as peak:
        one = given + 1.0
        given.view(10, 100).t()
        del one
        two = torch.cat([given, given])
        del two
    assert peak.value == 8000


def test_batches_are_cut_into_passes() -> None:
    """Memory is that of the fullest pass, time that of all of them and of the step."""
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


def test_available_memory_is_of_this_machine() -> None:
    """Some memory is free, and less than a machine can have."""
    assert 0 < available_bytes() < 1 << 50
