"""Adapters of stacked expert weights: comparison with peft, isolation, files, merging and training.

Legend: T tokens, V vocabulary.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fixtures import isolation
from fixtures.mixture_model import build_mixture, random_adapter
from twinkle.checkpoint_engine import AdapterMismatch, export_merged, read_peft_folder
from twinkle.checkpoint_engine.base_layers import check_fit, layer_shapes
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle.data_format import InputFeature, LoraConfig
from twinkle.model.dry_run.trainable import lora_size
from twinkle.model.engine import TrainerEngine
from twinkle.nn import (
    AdapterSpan,
    ExpertDropout,
    KVCache,
    LoraWeights,
    PackedCausalLM,
    SequenceSpan,
    UnknownTargetModules,
    load_adapter,
    merged_parameters,
    save_adapter,
)

LENGTH = 40
CONFIGS = {
    'both': LoraConfig(r=4, lora_alpha=8, target_modules=('q_proj', 'all-experts')),
    'ranks': LoraConfig(
        r=1,
        lora_alpha=6,
        use_rslora=True,
        target_modules=('mlp.experts.gate_up_proj', 'experts.down_proj', 'all-attention'),
        rank_pattern={'experts.gate_up_proj': 3},
        alpha_pattern={'layers.1.mlp.experts.down_proj': 2},
    ),
    'no experts': LoraConfig(r=8),
    'down': LoraConfig(r=2, target_modules='experts.down_proj'),
    'gate and up': LoraConfig(r=2, target_modules='layers.1.mlp.experts.gate_up_proj'),
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a mixture of experts; its file stores the experts separately."""
    return build_mixture(tmp_path_factory.mktemp('mixture'))


@pytest.fixture(scope='module')
def model(folder: Path) -> PackedCausalLM:
    """The mixture of experts as a packed model."""
    return PackedCausalLM.load(folder)


def ids_of(seed: int) -> Tensor:
    """Return random token ids."""
    return torch.randint(1, 320, (LENGTH,), generator=torch.Generator().manual_seed(seed))


def packed_logits(model: PackedCausalLM, adapters: Sequence[LoraWeights]) -> Tensor:
    """Return the logits [T, V] of one pass with a sequence of each adapter."""
    borders = [*range(0, LENGTH * len(adapters) + 1, LENGTH)]
    sequences = [SequenceSpan(begin, end) for begin, end in pairwise(borders)]
    spans = [
        AdapterSpan(span.begin_row, span.end_row, adapter) for span, adapter in zip(sequences, adapters, strict=True)
    ]
    ids = torch.cat([ids_of(seed) for seed in range(len(adapters))])
    positions = torch.arange(LENGTH).repeat(len(adapters))
    return model.logits(model.hidden(ids, positions, sequences=sequences, adapters=spans), adapters=spans)


def loss_of(logits: Tensor) -> Tensor:
    """Return a loss that depends on all logits."""
    return (logits.log_softmax(-1) * torch.linspace(-1, 1, logits.shape[-1])).sum()


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the expected tensor."""
    return float((found - expected).detach().norm() / expected.detach().norm())


# Peft applies patterns to parameters, but also warns that the patterns match no module.
@pytest.mark.filterwarnings('ignore:The following .*_pattern keys')
def test_adapters_in_one_pass_give_the_results_of_peft(folder, model, tmp_path):
    """Logits and gradients of adapters with different ranks and targets equal those of peft, which loads our files."""
    adapters = [random_adapter(model, config, seed=index) for index, config in enumerate(CONFIGS.values())]
    logits = packed_logits(model, adapters)
    loss_of(logits).backward()
    for index, adapter in enumerate(adapters):
        save_adapter(adapter, tmp_path / str(index), base_model=str(folder))
        base = AutoModelForCausalLM.from_pretrained(folder)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / str(index), is_trainable=True)
        expected = theirs(ids_of(index)[None]).logits[0]
        loss_of(expected).backward()
        assert relative(logits[index * LENGTH : (index + 1) * LENGTH], expected) < 1e-5
        gradients = {
            name.replace('.default.', '.'): parameter.grad
            for name, parameter in theirs.named_parameters()
            if parameter.requires_grad
        }
        own = adapter.named_parameters()
        assert own.keys() == gradients.keys()
        for name, parameter in own.items():
            assert relative(parameter.grad, gradients[name]) < 1e-5, name
        theirs.save_pretrained(tmp_path / f'back {index}')
        back = load_adapter(tmp_path / f'back {index}', model.targets)
        assert all(map(torch.equal, back.parameters(), adapter.parameters()))
        assert list(back.factors) == list(adapter.factors)


@pytest.mark.parametrize(('dtype', 'longest', 'seeds'), [('float32', 60, (0, 1, 2)), ('bfloat16', 12, (0,))])
def test_results_in_a_mix_are_bitwise_equal_to_results_alone(folder, dtype, longest, seeds):
    """Results and gradients of expert adapters do not depend on the other adapters of a pass."""
    model = PackedCausalLM.load(folder, dtype=dtype)
    targets = isolation.EXPERT_TARGETS
    found = [isolation.violations(model, seed, longest=longest, targets=targets) for seed in seeds]
    assert not any(found), found


def test_recomputed_activations_and_cached_passes_are_equal(folder, model):
    """Checkpointing gives bitwise the same gradients; passes that continue a cache give the same logits."""
    gradients = []
    for one in (model, PackedCausalLM.load(folder, is_checkpointed=True)):
        adapter = random_adapter(one, CONFIGS['ranks'], seed=3)
        loss_of(packed_logits(one, [adapter])).backward()
        gradients.append([parameter.grad for parameter in adapter.parameters()])
    assert all(map(torch.equal, *gradients))
    cache, logits = KVCache(), []
    with torch.no_grad():
        for begin, end in ((0, 17), (17, 18), (18, LENGTH)):
            span = [SequenceSpan(0, end - begin, cache)]
            adapters = [AdapterSpan(0, end - begin, adapter)]
            position_ids = torch.arange(begin, end)
            hidden = model.hidden(ids_of(0)[begin:end], position_ids, sequences=span, adapters=adapters)
            logits.append(model.logits(hidden, adapters=adapters))
        torch.testing.assert_close(torch.cat(logits), packed_logits(model, [adapter]), atol=2e-5, rtol=0)


def test_names_of_experts(model):
    """`all-linear` excludes experts; their names need the prefix `experts.`, and their dropout is refused."""

    def paths(targets, **fields):
        return list(LoraWeights.create(model.targets, LoraConfig(target_modules=targets, **fields), seed=0).factors)

    assert set(paths('all-linear')) == set(model.layers)
    assert paths('all-experts') == list(model.experts)
    assert paths(('layers.0.mlp.experts.down_proj',)) == ['model.layers.0.mlp.experts.down_proj']
    for name in ('down_proj', 'gate_up_proj', 'experts', 'all-mlp'):
        with pytest.raises(UnknownTargetModules) as refusal:
            paths(name)
        assert {'experts.gate_up_proj', 'experts.down_proj', 'q_proj'} <= set(refusal.value.known)
    with pytest.raises(ExpertDropout, match='lora_dropout'):
        paths(('q_proj', 'experts.down_proj'), lora_dropout=0.1)
    assert paths('q_proj', lora_dropout=0.1)


def test_peft_configurations_are_accepted(model):
    """`target_parameters` of peft selects the same weights; names of other parameters are refused."""
    config = peft.LoraConfig(r=2, target_modules=['q_proj'], target_parameters=['mlp.experts.down_proj'])
    assert set(LoraConfig.of(config).target_modules) == {'q_proj', 'mlp.experts.down_proj'}
    alone = LoraConfig.of(peft.LoraConfig(target_parameters=['experts.gate_up_proj']))
    assert alone.target_modules == ('experts.gate_up_proj',)
    for name in ('down_proj', 'mlp.gate.weight'):
        with pytest.raises(ValueError, match='target_parameters'):
            LoraConfig.of(peft.LoraConfig(target_parameters=[name]))


def test_the_size_of_an_adapter_is_known_in_advance(model):
    """The estimated number of trainable parameters equals the adapter's number."""
    for config in CONFIGS.values():
        size = lora_size(model.targets, config, optimizer='AdamW', options={})
        assert size.parameter_count == LoraWeights.create(model.targets, config, seed=0).parameter_count


@pytest.mark.parametrize('is_stacked', [False, True])
def test_merged_folders_give_the_adapters_results(folder, model, tmp_path, is_stacked):
    """A merged folder gives the adapter's logits, whether the base folder stores experts separately or stacked."""
    base = _stacked(folder, tmp_path / 'base', model) if is_stacked else folder
    for name in ('both', 'down', 'gate and up'):
        adapter = random_adapter(model, CONFIGS[name], seed=5)
        save_adapter(adapter, tmp_path / 'adapter', base_model=str(folder))
        tensors, config = read_peft_folder(tmp_path / 'adapter')
        result = export_merged(base, tensors, config, tmp_path / 'out')
        with torch.no_grad():
            expected = packed_logits(model, [adapter])
            found = AutoModelForCausalLM.from_pretrained(result.folder)(ids_of(0)[None]).logits[0]
        assert relative(found, expected) < 1e-5
    merged = merged_parameters(model, adapter)
    delta = (
        merged['model.layers.1.mlp.experts.gate_up_proj']
        - model.base_parameters['model.layers.1.mlp.experts.gate_up_proj']
    )
    torch.testing.assert_close(delta, adapter.factors['model.layers.1.mlp.experts.gate_up_proj'].delta().detach())


def test_adapters_of_another_number_of_experts_are_refused(folder, model, tmp_path):
    """An adapter is refused if its rank exceeds the limit, or its tensors do not match its rank or the base model."""
    base = ModelFolder.open(folder)
    config = CONFIGS['down']
    state = LoraWeights.create(model.targets, config, seed=0).peft_state()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_fit(layer_shapes(base), shapes, config, max_rank=2)
    with pytest.raises(AdapterMismatch, match='rank 2'):
        check_fit(layer_shapes(base), shapes, config, max_rank=1)
    for factor in (0.5, 2):
        resized = {
            name: (int(a * factor), b) if 'lora_A' in name else (a, int(b * factor)) for name, (a, b) in shapes.items()
        }
        with pytest.raises(AdapterMismatch, match='base model has'):
            check_fit(layer_shapes(base), resized, config, max_rank=8)
    save_adapter(random_adapter(model, config, seed=1), tmp_path / 'a', base_model=str(folder))
    file = tmp_path / 'a' / 'adapter_config.json'
    file.write_text(json.dumps({**json.loads(file.read_text()), 'r': 3}))
    with pytest.raises(ValueError, match='multiple of rank 3'):
        load_adapter(tmp_path / 'a', model.targets)


def test_a_restored_run_continues_bitwise(model):
    """Steps after a restoration in another engine give the weights of a run without interruption."""
    engines = [TrainerEngine(model), TrainerEngine(model)]
    engines[0].create_adapter('a', CONFIGS['both'])
    engines[0].set_optimizer('a', 'AdamW', lr=1e-2)
    _train(engines[0], seed=0)
    before = [parameter.detach().clone() for parameter in engines[0].adapter('a').weights.parameters()]
    assert all(bool(parameter.any()) for parameter in before)
    engines[1].restore_adapter('a', engines[0].snapshot('a'))
    for engine in engines:
        _train(engine, seed=1)
    after = [engine.adapter('a').weights.parameters() for engine in engines]
    assert all(map(torch.equal, *after))
    assert not any(map(torch.equal, before, after[0]))


def _train(engine: TrainerEngine, *, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(1, 320, 31)
    engine.forward_backward('a', [InputFeature(input_ids=ids[:-1], labels=ids[1:])])
    engine.clip_grad_and_step('a')


def _stacked(folder: Path, target: Path, model: PackedCausalLM) -> Path:
    """Write the model to the folder `target` with stacked experts, and return this folder."""
    target.mkdir()
    (target / 'config.json').write_bytes((folder / 'config.json').read_bytes())
    own = {name: tensor.clone() for name, tensor in model.base_state()}
    names = set(load_file(folder / 'model.safetensors'))
    assert set(own) - names == set(model.experts)
    save_file(own, target / 'model.safetensors', metadata={'format': 'pt'})
    return target
