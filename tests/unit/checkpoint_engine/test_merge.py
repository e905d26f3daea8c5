"""Unit tests of `export_merged`: transformers loads merged folders and computes the adapter's results."""

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
    """Return the model's logits of a few tokens."""
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def files(folder):
    """Return the content of every file by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sharded(tmp_path_factory, family):
    """Create a model folder with several shards and a code file."""
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
    """Return the folder of a model with tied embeddings and biases."""
    return sharded(tmp_path_factory, 'qwen2')


@pytest.fixture(scope='module', params=['llama', 'qwen2', 'qwen3'])
def any_base(request, tmp_path_factory):
    """Return the folder of a model with tied (llama, qwen2) or untied embeddings."""
    return sharded(tmp_path_factory, request.param)


@pytest.mark.parametrize('options', [{}, {'use_rslora': True, 'rank_pattern': {}, 'alpha_pattern': {}}])
def test_a_merged_folder_gives_the_adapters_results(any_base, tmp_path, options):
    """The merged model in transformers gives the adapter's logits, for several configurations."""
    model, tensors, config = adapter(any_base, tmp_path / 'adapter', **options)
    result = export_merged(any_base, tensors, config, tmp_path / 'out')
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(merged), logits(AutoModelForCausalLM.from_pretrained(any_base)), atol=1e-2)
    assert result.merged_layer_count == 6
    assert AutoTokenizer.from_pretrained(tmp_path / 'out')('hello')['input_ids']


def test_only_adapted_weights_differ_from_the_base(any_base, tmp_path):
    """The folder has the base model's files except code, and weights without an adapter are bitwise unchanged."""
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
def test_weights_can_be_written_in_a_narrower_type(base, tmp_path, dtype):
    """Weights are rounded once, from the float32 sum, as torch rounds."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    export_merged(base, tensors, config, tmp_path / 'exact')
    export_merged(base, tensors, config, tmp_path / 'out', dtype=dtype)
    for path in base.glob('*.safetensors'):
        exact, rounded = load_file(tmp_path / 'exact' / path.name), load_file(tmp_path / 'out' / path.name)
        for name, tensor in exact.items():
            assert torch.equal(rounded[name], tensor.to(getattr(torch, dtype)))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / 'out').dtype == getattr(torch, dtype)


def test_a_bfloat16_base_stays_bfloat16(tmp_path):
    """A bfloat16 model is merged in float32 and written as bfloat16."""
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
    actual = load_file(tmp_path / 'out' / 'model.safetensors')[f'{path}.weight']
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=2**-8, atol=1e-6)


def test_merging_is_deterministic(base, tmp_path):
    """Two merges of the same inputs give bitwise equal files."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    export_merged(base, tensors, config, tmp_path / 'one')
    export_merged(base, tensors, config, tmp_path / 'two')
    assert files(tmp_path / 'one') == files(tmp_path / 'two')


class Interrupted(Exception):
    """Raised by a progress callback to interrupt a merge."""


def interrupt_at(fraction):
    """Return a progress callback that interrupts the merge after this fraction of the bytes."""

    def report(done, total):
        if done >= fraction * total:
            raise Interrupted

    return report


def test_an_interrupted_merge_resumes(base, tmp_path):
    """An interrupted merge leaves no target folder; a repeated merge continues after the finished files."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    export_merged(base, tensors, config, tmp_path / 'whole')
    (tmp_path / 'work').mkdir()
    staging = tmp_path / 'work' / '.out.merging'
    for share in (0.0, 0.3, 0.6, 0.95):
        with pytest.raises(Interrupted):
            export_merged(base, tensors, config, tmp_path / 'work' / 'out', on_progress=interrupt_at(share))
        assert [path.name for path in staging.parent.iterdir()] == ['.out.merging']
    finished = {path: path.stat().st_mtime_ns for path in staging.glob('*.safetensors')}
    assert finished
    export_merged(base, tensors, config, tmp_path / 'work' / 'out')
    assert [path.name for path in staging.parent.iterdir()] == ['out']
    assert files(tmp_path / 'work' / 'out') == files(tmp_path / 'whole')
    for path, moment in finished.items():
        assert (staging.parent / 'out' / path.name).stat().st_mtime_ns == moment


def test_files_of_another_merge_are_not_reused(base, tmp_path):
    """A merge does not reuse the unfinished files of a merge with other weights or another dtype."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    others = {name: TensorData(t.dtype, t.shape, bytes(len(t.data))) for name, t in tensors.items()}
    for args, options in (((others, config), {}), ((tensors, config), {'dtype': 'float16'})):
        with pytest.raises(Interrupted):
            export_merged(base, *args, tmp_path / 'out', on_progress=interrupt_at(0.95), **options)
    export_merged(base, tensors, config, tmp_path / 'out')
    export_merged(base, tensors, config, tmp_path / 'alone')
    assert files(tmp_path / 'out') == files(tmp_path / 'alone')


def test_a_repeat_has_no_effect_and_a_change_replaces_the_folder(base, tmp_path):
    """A folder that was made from the same inputs is left unchanged, and a folder from other inputs is replaced."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    first = export_merged(base, tensors, config, tmp_path / 'out')
    (tmp_path / 'out' / 'note').touch()
    repeated = export_merged(base, tensors, config, tmp_path / 'out', on_progress=interrupt_at(0))
    assert (first.is_repeat, repeated.is_repeat) == (False, True)
    assert (first.size_bytes, first.merged_layer_count) == (repeated.size_bytes, repeated.merged_layer_count)
    assert not export_merged(base, tensors, config, tmp_path / 'out', dtype='float16').is_repeat
    assert not (tmp_path / 'out' / 'note').exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['adapter', 'out']


def test_progress_reaches_the_end(base, tmp_path):
    """Progress increases up to the total number of bytes."""
    _, tensors, config = adapter(base, tmp_path / 'adapter')
    reports = []
    export_merged(base, tensors, config, tmp_path / 'out', on_progress=lambda *report: reports.append(report))
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert {total for _, total in reports} == {reports[-1][0]}


def test_two_processes_cannot_write_one_folder(base, tmp_path):
    """A merge into a folder that another process is writing raises MergeRunning."""
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
    """Unknown layers, wrong shapes and missing factors are refused before any write; an empty adapter is accepted."""
    config = LoraConfig(r=2)
    if not state:
        export_merged(base, state, config, tmp_path / 'out')
        return
    with pytest.raises(AdapterMismatch):
        export_merged(base, state, config, tmp_path / 'out')
    assert not list(tmp_path.iterdir())


def broken_bases():
    """Return functions that damage a base folder, by the name of the damage."""
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
def test_an_invalid_base_folder_is_refused(tmp_path, name):
    """A damaged base folder raises an InvalidModelFolder that names the file, and nothing is written."""
    folder = build_tiny_model(tmp_path / 'base')
    broken_bases()[name](folder)
    with pytest.raises(InvalidModelFolder) as refusal:
        export_merged(folder, lora('model.layers.0.self_attn.q_proj'), LoraConfig(r=2), tmp_path / 'out')
    assert refusal.value.file_name
    assert [path.name for path in tmp_path.iterdir()] == ['base']


def test_an_unknown_dtype_is_refused(base, tmp_path):
    """An unknown dtype raises ValueError."""
    with pytest.raises(ValueError, match='dtype'):
        export_merged(base, {}, LoraConfig(), tmp_path / 'out', dtype='int8')


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
def test_rounding_equals_that_of_torch(dtype):
    """Conversion between the dtype and float32 equals torch's for random values, ties, overflow and NaN."""
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (np.arange(0, 2**16, dtype=np.uint32) << 16) | np.uint32(0x8000)
    values = np.concatenate([random, ties, ties - 1, ties + 1]).view(np.float32)
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    actual = torch.frombuffer(bytearray(from_float32(values, dtype)), dtype=getattr(torch, dtype))
    assert torch.equal(actual.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(actual[finite], expected[finite])
    assert np.array_equal(to_float32(from_float32(values, dtype), dtype), expected.float().numpy(), equal_nan=True)


def test_full_weights_replace_those_of_the_base_model(tmp_path_factory, tmp_path):
    """A state without a LoRA configuration replaces the named weights and keeps the other weights."""
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


def test_full_weights_that_do_not_fit_are_refused(tmp_path_factory, tmp_path):
    """An unknown name or a wrong shape raises an AdapterMismatch that names the weight, and nothing is written."""
    base = sharded(tmp_path_factory, 'llama')
    for name, shape in (('model.nothing.weight', (4,)), ('model.norm.weight', (4,))):
        state = {name: TensorData('float32', shape, bytes(16))}
        with pytest.raises(AdapterMismatch, match=name):
            export_merged(base, state, None, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
