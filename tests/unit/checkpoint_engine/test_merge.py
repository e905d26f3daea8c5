"""Merged folders load in plain transformers and compute what the adapter computes beside the base model."""

import fcntl
import json
import math
import os

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures.tiny_model import build_tiny_model
from twinkle.checkpoint_engine import (
    MERGE_FILE,
    AdapterMismatch,
    InvalidModelFolder,
    MergeRunning,
    export_merged,
    read_peft_folder,
)
from twinkle.checkpoint_engine.float_bytes import from_float32, to_float32
from twinkle.data_format import LoraConfig, TensorData

IDS = torch.tensor([[5, 100, 17, 250, 42, 9, 77, 203]])
OPTIONS = {
    'r': 4,
    'lora_alpha': 9,
    'target_modules': ['q_proj', 'o_proj', 'down_proj'],
    'rank_pattern': {'down_proj': 2},
    'alpha_pattern': {'o_proj': 3},
}


def adapter(base, folder, **options):
    """Save an adapter with random weights; return its model, tensors and configuration."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(**{**OPTIONS, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'lora_' in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model, *read_peft_folder(folder)


def logits(model):
    """Return the logits of a few tokens."""
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def files(folder):
    """Return every file's bytes by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sharded(tmp_path_factory, family):
    """Make a model's folder in several shards, with code beside it."""
    single = build_tiny_model(tmp_path_factory.mktemp('single'), family=family)
    folder = tmp_path_factory.mktemp('base')
    AutoModelForCausalLM.from_pretrained(single).save_pretrained(folder, max_shard_size='150KB')
    for path in single.glob('*.json'):
        if not (folder / path.name).exists():
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / 'modeling_custom.py').write_text('raise SystemExit')
    assert len(list(folder.glob('*.safetensors'))) > 1
    return folder


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """Return a model with tied embeddings and biases."""
    return sharded(tmp_path_factory, 'qwen2')


@pytest.fixture(scope='module', params=['llama', 'qwen2', 'qwen3'])
def any_base(request, tmp_path_factory):
    """Return a model with tied (llama, qwen2) or untied embeddings."""
    return sharded(tmp_path_factory, request.param)


@pytest.mark.parametrize('options', [{}, {'use_rslora': True, 'rank_pattern': {}, 'alpha_pattern': {}}])
def test_a_merged_folder_computes_what_the_adapter_does(any_base, tmp_path, options):
    """With ranks and alphas of their own, tied embeddings or not, and nothing of ours needed to load it."""
    model, tensors, config = adapter(any_base, tmp_path / 'adapter', **options)
    result = export_merged(any_base, tensors, config, tmp_path / 'out')
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(merged), logits(AutoModelForCausalLM.from_pretrained(any_base)), atol=1e-2)
    assert result.merged_layer_count == 6
    assert AutoTokenizer.from_pretrained(tmp_path / 'out')('hello')['input_ids']


def test_the_folder_is_the_bases_but_for_the_merged_weights(any_base, tmp_path):
    """Same files but code, same tensors in the same shards; every weight that no layer adapts keeps its bits."""
    _, tensors, config = adapter(any_base, tmp_path / 'adapter')
    export_merged(any_base, tensors, config, tmp_path / 'out')
    before, after = files(any_base), files(tmp_path / 'out')
    assert after.keys() - {MERGE_FILE} == before.keys() - {'modeling_custom.py'}
    assert json.loads(after['config.json']) == json.loads(before['config.json'])
    for path in any_base.glob('*.safetensors'):
        old, new = load_file(path), load_file(tmp_path / 'out' / path.name)
        assert list(old) == list(new)
        for name, tensor in old.items():
            is_adapted = name.endswith(tuple(f'{target}.weight' for target in OPTIONS['target_modules']))
            assert torch.equal(tensor, new[name]) is not is_adapted
    size = sum(tensor.nbytes for path in any_base.glob('*.safetensors') for tensor in load_file(path).values())
    assert json.loads(after['model.safetensors.index.json'])['metadata']['total_size'] == size


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_weights_can_be_written_smaller(base, tmp_path, dtype):
    """Rounded once, from the float32 sum, as torch would round it."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    export_merged(base, tensors, config, tmp_path / 'exact')
    export_merged(base, tensors, config, tmp_path / 'out', dtype=dtype)
    for path in base.glob('*.safetensors'):
        exact, rounded = load_file(tmp_path / 'exact' / path.name), load_file(tmp_path / 'out' / path.name)
        for name, tensor in exact.items():
            assert torch.equal(rounded[name], tensor.to(getattr(torch, dtype)))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / 'out').dtype == getattr(torch, dtype)


def test_a_bfloat16_base_stays_bfloat16(tmp_path):
    """The sum is float32, also where both sides are smaller."""
    base = build_tiny_model(tmp_path / 'base')
    weights = {name: tensor.bfloat16() for name, tensor in load_file(base / 'model.safetensors').items()}
    save_file(weights, base / 'model.safetensors', metadata={'format': 'pt'})
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    export_merged(base, tensors, config, tmp_path / 'out')
    path = 'model.layers.1.self_attn.q_proj'
    a, b = (
        torch.frombuffer(bytearray(tensors[f'base_model.model.{path}.lora_{part}.weight'].data), dtype=torch.float32)
        for part in 'AB'
    )
    expected = weights[f'{path}.weight'].float() + 9 / 4 * (b.reshape(-1, 4) @ a.reshape(4, -1))
    found = load_file(tmp_path / 'out' / 'model.safetensors')[f'{path}.weight']
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-6)


def test_the_bits_are_the_same_each_time(base, tmp_path):
    """Two merges of the same give equal files."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    export_merged(base, tensors, config, tmp_path / 'one')
    export_merged(base, tensors, config, tmp_path / 'two')
    assert files(tmp_path / 'one') == files(tmp_path / 'two')


class Cut(Exception):
    """What a test stops a merge with."""


def cut_at(share):
    """Return a progress that stops the merge when it has done its share."""

    def report(done, total):
        if done >= share * total:
            raise Cut

    return report


def test_a_merge_that_was_cut_off_goes_on(base, tmp_path):
    """Wherever it was: nothing is in place before, finished files are not written again, the end is the same."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    export_merged(base, tensors, config, tmp_path / 'whole')
    (tmp_path / 'work').mkdir()
    staging = tmp_path / 'work' / '.out.merging'
    for share in (0.0, 0.3, 0.6, 0.95):
        with pytest.raises(Cut):
            export_merged(base, tensors, config, tmp_path / 'work' / 'out', on_progress=cut_at(share))
        assert [path.name for path in staging.parent.iterdir()] == ['.out.merging']
    finished = {path: path.stat().st_mtime_ns for path in staging.glob('*.safetensors')}
    assert finished
    export_merged(base, tensors, config, tmp_path / 'work' / 'out')
    assert [path.name for path in staging.parent.iterdir()] == ['out']
    assert files(tmp_path / 'work' / 'out') == files(tmp_path / 'whole')
    for path, moment in finished.items():
        assert (staging.parent / 'out' / path.name).stat().st_mtime_ns == moment


def test_what_another_merge_left_is_not_taken_over(base, tmp_path):
    """Other weights, another alpha or another dtype begin anew."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    others = {name: TensorData(t.dtype, t.shape, bytes(len(t.data))) for name, t in tensors.items()}
    for args, options in (((others, config), {}), ((tensors, config), {'dtype': 'float16'})):
        with pytest.raises(Cut):
            export_merged(base, *args, tmp_path / 'out', on_progress=cut_at(0.95), **options)
    export_merged(base, tensors, config, tmp_path / 'out')
    export_merged(base, tensors, config, tmp_path / 'alone')
    assert files(tmp_path / 'out') == files(tmp_path / 'alone')


def test_a_repeat_does_nothing_and_a_change_replaces(base, tmp_path):
    """A folder made from the same is left alone; one made from something else goes as a whole."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    first = export_merged(base, tensors, config, tmp_path / 'out')
    (tmp_path / 'out' / 'note').touch()
    again = export_merged(base, tensors, config, tmp_path / 'out', on_progress=cut_at(0))
    assert (first.is_repeat, again.is_repeat) == (False, True)
    assert (first.size_bytes, first.merged_layer_count) == (again.size_bytes, again.merged_layer_count)
    assert not export_merged(base, tensors, config, tmp_path / 'out', dtype='float16').is_repeat
    assert not (tmp_path / 'out' / 'note').exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['adapter', 'out']


def test_progress_reaches_the_end(base, tmp_path):
    """Rising, of one total, and the last report is of all bytes."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    reports = []
    export_merged(base, tensors, config, tmp_path / 'out', on_progress=lambda *report: reports.append(report))
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert {total for _, total in reports} == {reports[-1][0]}


def test_two_processes_do_not_write_one_folder(base, tmp_path):
    """The second is told so."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    with (tmp_path / '.out.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(MergeRunning):
            export_merged(base, tensors, config, tmp_path / 'out')
    export_merged(base, tensors, config, tmp_path / 'out')


def lora(path, outputs=64, inputs=64, rank=2):
    """Return an adapter of one layer."""
    shapes = {'A': (rank, inputs), 'B': (outputs, rank)}
    return {
        f'base_model.model.{path}.lora_{part}.weight': TensorData('float32', shape, bytes(4 * math.prod(shape)))
        for part, shape in shapes.items()
    }


@pytest.mark.parametrize(
    'state',
    [
        {},
        lora('model.layers.9.self_attn.q_proj'),
        lora('model.layers.0.self_attn.q_proj', outputs=63),
        lora('model.layers.0.input_layernorm', outputs=64, inputs=1),
        {name: t for name, t in lora('model.layers.0.self_attn.q_proj').items() if 'lora_A' in name},
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(base, tmp_path, state):
    """Layers the model has not, other shapes, halves: before a byte is written. Nothing at all is a plain copy."""
    config = LoraConfig(r=2)
    if not state:
        export_merged(base, state, config, tmp_path / 'out')
        return
    with pytest.raises(AdapterMismatch):
        export_merged(base, state, config, tmp_path / 'out')
    assert not list(tmp_path.iterdir())


def broken_bases():
    """Return what breaks a base folder, by name."""
    return {
        'config.json': lambda folder: (folder / 'config.json').unlink(),
        'quantized': lambda folder: (folder / 'config.json').write_text('{"quantization_config": {}}'),
        'no weights': lambda folder: (folder / 'model.safetensors').unlink(),
        'pickled': lambda folder: (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin'),
        'cut': lambda folder: os.truncate(folder / 'model.safetensors', 5000),
        'index': lambda folder: (folder / 'model.safetensors.index.json').write_text('[]'),
        'outside': lambda folder: (folder / 'model.safetensors.index.json').write_text(
            '{"weight_map": {"a": "../model.safetensors"}}'
        ),
        'missing shard': lambda folder: (folder / 'model.safetensors.index.json').write_text(
            '{"weight_map": {"a": "model-1.safetensors"}}'
        ),
    }


@pytest.mark.parametrize('name', broken_bases())
def test_a_base_that_cannot_be_merged_into_is_refused(tmp_path, name):
    """The file at fault is named, and nothing is written."""
    folder = build_tiny_model(tmp_path / 'base')
    broken_bases()[name](folder)
    with pytest.raises(InvalidModelFolder) as refusal:
        export_merged(folder, lora('model.layers.0.self_attn.q_proj'), LoraConfig(r=2), tmp_path / 'out')
    assert refusal.value.file_name
    assert [path.name for path in tmp_path.iterdir()] == ['base']


def test_an_unknown_dtype_is_refused(base, tmp_path):
    """Before anything is read."""
    with pytest.raises(ValueError, match='dtype'):
        export_merged(base, {}, LoraConfig(), tmp_path / 'out', dtype='int8')


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
def test_numbers_are_rounded_as_torch_rounds_them(dtype):
    """Every kind of float32: ties, the smallest and largest, infinities, no numbers; and back again."""
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (np.arange(0, 2**16, dtype=np.uint32) << 16) | np.uint32(0x8000)
    values = np.concatenate([random, ties, ties - 1, ties + 1]).view(np.float32)
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    found = torch.frombuffer(bytearray(from_float32(values, dtype)), dtype=getattr(torch, dtype))
    assert torch.equal(found.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(found[finite], expected[finite])
    assert np.array_equal(to_float32(from_float32(values, dtype), dtype), expected.float().numpy(), equal_nan=True)


def test_whole_weights_take_the_place_of_the_base_models(tmp_path_factory, tmp_path):
    """Without a configuration the state is weights by the model's own names; those not given stay as they were."""
    base = sharded(tmp_path_factory, 'qwen2')
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(1)
    changed = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'mlp' in name or name == 'model.norm.weight':
                parameter.add_(0.1 * torch.randn(parameter.shape))
                changed[name] = TensorData('float32', tuple(parameter.shape), parameter.numpy().tobytes())
    result = export_merged(base, changed, None, tmp_path / 'out')
    assert result.merged_layer_count == len(changed)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(result.folder)), logits(model))


def test_whole_weight_that_the_model_has_not_is_refused(tmp_path_factory, tmp_path):
    """A name or a shape that the base model has not is named, and nothing is written."""
    base = sharded(tmp_path_factory, 'llama')
    for name, shape in (('model.nothing.weight', (4,)), ('model.norm.weight', (4,))):
        state = {name: TensorData('float32', shape, bytes(16))}
        with pytest.raises(AdapterMismatch, match=name):
            export_merged(base, state, None, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
