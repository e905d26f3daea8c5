"""Unit tests of the weight transfer to vLLM and of the checks before it."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from fixtures.sampled import LORA, lora_tensors
from twinkle.data_format import LoraConfig, TensorData
from twinkle.sampler.vllm.base_weights import problem_with
from twinkle.sampler.vllm.handover import in_memory_file, layout_of
from twinkle.sampler.vllm.merge import merged
from twinkle.sampler.vllm.options import engine_args
from twinkle.sampler.vllm.plans import Misfit, make_plan
from twinkle.sampler.vllm.sources import adapter_source, folder_tensors


def test_file_contains_the_tensors_at_the_offsets_of_the_layout():
    """The temporary file contains all tensors at the described offsets, and is deleted afterwards."""
    tensors = {f't{index}': TensorData.from_numpy(np.full((3,), index, np.float32)) for index in range(2500)}
    layout = json.loads(layout_of(tensors))
    with in_memory_file(tensors) as path:
        content = Path(path).read_bytes()
    assert not Path(path).exists()
    assert len(content) == layout['size_bytes'] == 2500 * 12
    for name, dtype, shape, offset in layout['tensors']:
        assert (dtype, shape) == ('float32', [3])
        assert content[offset : offset + 12] == bytes(tensors[name].data)


def test_segment_is_used_without_a_copy(tmp_path):
    """An existing file with the tensors is used directly, and is not deleted."""
    segment = tmp_path / 'segment'
    segment.write_bytes(b'1234')
    tensors = {'t': TensorData('float32', (1,), b'1234')}
    with in_memory_file(tensors, segment_path=str(segment)) as path:
        assert path == str(segment)
    assert segment.exists()


def test_versions_of_one_adapter_have_one_layout():
    """All versions of an adapter have equal layouts, so they share one plan."""
    assert layout_of(lora_tensors(1), LORA) == layout_of(lora_tensors(2), LORA)


async def count(name: str, last: int):
    """Yield pairs of a name and a number."""
    for number in range(last):
        await asyncio.sleep(0)
        yield name, number


async def fail():
    """Yield once and fail."""
    yield 'bad', 0
    raise LookupError


async def collect(items) -> list:
    """Return all items."""
    return [item async for item in items]


async def test_merged_streams_keep_their_order():
    """A merged stream yields every item once and keeps the order of each stream."""
    items = await collect(merged([count('a', 5), count('b', 3), count('c', 0)]))
    assert [number for name, number in items if name == 'a'] == [0, 1, 2, 3, 4]
    assert [number for name, number in items if name == 'b'] == [0, 1, 2]


async def test_merged_streams_fail_together():
    """The first error of a stream propagates, and all streams are closed."""
    async with aclosing(merged([count('a', 10**9), fail()])) as items:
        with pytest.raises(LookupError):
            await collect(items)


def test_fixed_and_unknown_engine_arguments_are_refused(tiny_llama_dir):
    """Arguments that would give wrong results, and arguments that vLLM does not know, raise ValueError."""
    for name, value in (
        ('max_cpu_loras', 1),
        ('logprobs_mode', 'processed_logprobs'),
        ('structured_outputs_config', {'backend': 'guidance'}),
        ('reasoning_parser_plugin', 'mine.py'),
        ('no_such_thing', 1),
    ):
        with pytest.raises(ValueError, match=name):
            engine_args(str(tiny_llama_dir), {name: value})


def test_auto_dtype_keeps_float32(tiny_llama_dir):
    """The dtype 'auto' keeps a float32 model, although vLLM would convert it to bfloat16."""
    assert engine_args(str(tiny_llama_dir), {'dtype': 'auto'}).dtype == 'float32'
    assert engine_args(str(tiny_llama_dir), {'dtype': 'bfloat16'}).dtype == 'bfloat16'


def test_base_weights_are_checked_before_replacement(tiny_llama_dir):
    """Missing and unknown tensors, and tensors with a wrong shape or dtype, are reported."""
    folder, whole = str(tiny_llama_dir), folder_tensors(str(tiny_llama_dir))
    assert problem_with(folder, whole) == ''
    name = 'model.norm.weight'
    without = {key: tensor for key, tensor in whole.items() if key != name}
    other = TensorData('float32', (2,), bytes(8))
    for invalid in (without, {**whole, 'other': other}, {**whole, name: other}):
        assert problem_with(folder, invalid)
    assert 'int64' in problem_with(folder, {**whole, name: TensorData('int64', (64,), bytes(512))})


def test_new_adapter_has_the_target_layers(tiny_llama_dir):
    """A new adapter has zero factors for every target layer; targets that match no layer raise ValueError."""
    source = adapter_source(str(tiny_llama_dir), LORA)
    assert source.tensors.keys() == lora_tensors(1).keys()
    assert not any(tensor.to_numpy().any() for tensor in source.tensors.values())
    with pytest.raises(ValueError, match='no_such'):
        adapter_source(str(tiny_llama_dir), type(LORA)(target_modules=('no_such',)))


class Model:
    """A model without a mapping of tensor names."""


class Manager:
    """The part of vLLM's adapter manager that a plan needs."""

    model = Model()


def test_duplicate_names_of_a_matrix_are_refused():
    """Two names for the same matrix raise Misfit."""
    tensors = lora_tensors(1)
    name = next(iter(tensors))
    twice = {**tensors, name.removeprefix('base_model.model.'): tensors[name]}
    with pytest.raises(Misfit):
        make_plan(Manager(), layout_of(twice, LORA))


def test_expert_adapters_are_refused(tmp_path):
    """Expert tensors raise Misfit before they are loaded, and a configuration that names experts raises ValueError."""
    name, tensor = next(iter(lora_tensors(1).items()))
    stacked = {name.replace('self_attn.q_proj', f'mlp.experts{nested}'): tensor for nested in ('', '.base_layer')}
    assert set(stacked).isdisjoint({name})
    with pytest.raises(Misfit, match='torch engine'):
        make_plan(Manager(), layout_of(stacked, LORA))
    for target in ('all-experts', 'mlp.experts.down_proj'):
        with pytest.raises(ValueError, match='torch engine'):
            adapter_source(str(tmp_path), LoraConfig(target_modules=('q_proj', target)))
