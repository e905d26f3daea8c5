"""Unit tests of PEFT folders: round trips, compatibility with safetensors and PEFT, and malformed files."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from twinkle.checkpoint_engine import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_MODEL_FILE,
    InvalidManifest,
    InvalidPeftFolder,
    build_header,
    pack_state,
    parse_adapter_config,
    parse_header,
    read_peft_folder,
    write_peft_folder,
)
from twinkle.checkpoint_engine.peft_folder import replace_folder
from twinkle.data_format import DTYPE_NAMES, LoraConfig, TensorData

PREFIX = 'base_model.model.model.layers.0.self_attn'
FULL_CONFIG = LoraConfig(
    r=4,
    lora_alpha=6.5,
    lora_dropout=0.1,
    target_modules=('q_proj', 'v_proj'),
    use_rslora=True,
    rank_pattern={'v_proj': 2},
    alpha_pattern={'v_proj': 3.0},
    seed=7,
)


def lora_tensors(*, dtype: str = 'float32') -> dict[str, TensorData]:
    """Return the weights of two adapted layers; `v_proj` has a different rank."""
    width = {'float32': 4, 'bfloat16': 2}[dtype]
    shapes = {
        'q_proj.lora_A': (4, 6),
        'q_proj.lora_B': (6, 4),
        'v_proj.lora_A': (2, 6),
        'v_proj.lora_B': (6, 2),
    }
    random = np.random.default_rng(0)
    return {
        f'{PREFIX}.{name}.weight': TensorData(dtype, shape, random.bytes(shape[0] * shape[1] * width))
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_folder_round_trip_is_lossless(tmp_path: Path, dtype: str) -> None:
    """A folder that is written and read has the same weights, dtypes, shapes and configuration, including the seed."""
    tensors = lora_tensors(dtype=dtype)
    write_peft_folder(tmp_path / 'deep' / 'adapter', tensors, FULL_CONFIG, base_model='org/tiny')
    assert read_peft_folder(tmp_path / 'deep' / 'adapter') == (tensors, FULL_CONFIG)


def test_all_linear_is_expanded_to_module_names(tmp_path: Path) -> None:
    """`all-linear` is written as a list of the adapted modules' names."""
    config = LoraConfig(r=4, rank_pattern={'v_proj': 2})
    write_peft_folder(tmp_path / 'a', lora_tensors(), config, base_model='org/tiny')
    assert read_peft_folder(tmp_path / 'a')[1].target_modules == ('q_proj', 'v_proj')


def test_write_replaces_a_folder_completely(tmp_path: Path) -> None:
    """Writing to an existing folder replaces all of its files and leaves no temporary files."""
    write_peft_folder(tmp_path / 'a', lora_tensors(), LoraConfig(), base_model='org/tiny')
    (tmp_path / 'a' / 'stray').touch()
    write_peft_folder(tmp_path / 'a', lora_tensors(), FULL_CONFIG, base_model='org/tiny')
    assert [path.name for path in tmp_path.iterdir()] == ['a']
    assert sorted(path.name for path in (tmp_path / 'a').iterdir()) == [ADAPTER_CONFIG_FILE, ADAPTER_MODEL_FILE]


def test_failed_replacement_keeps_the_old_folder(tmp_path: Path) -> None:
    """If the new folder cannot be moved into place, the old folder is moved back."""
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / 'file').touch()
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / 'a', tmp_path / 'missing', previous=tmp_path / 'old')
    assert [path.name for path in tmp_path.iterdir()] == ['a']
    assert (tmp_path / 'a' / 'file').exists()


def test_a_refused_write_creates_no_files(tmp_path: Path) -> None:
    """An invalid state is refused before the first file is written."""
    with pytest.raises(InvalidManifest):
        write_peft_folder(tmp_path / 'a', {}, LoraConfig(), base_model='org/tiny')
    assert not list(tmp_path.iterdir())


@given(data=st.data(), count=st.integers(1, 5))
def test_the_safetensors_library_reads_the_header(data: st.DataObject, count: int) -> None:
    """The safetensors library reads the header of files with tensors of every dtype and shape."""
    tensors: dict[str, TensorData] = {}
    for index in range(count):
        dtype = data.draw(st.sampled_from(DTYPE_NAMES))
        shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
        size = len(np.zeros(shape, np.uint8).tobytes()) * {'bool': 1, 'uint8': 1}.get(dtype, 0)
        size = size or int(np.prod(shape)) * int(''.join(filter(str.isdigit, dtype)) or 8) // 8
        tensors[f't{index}\u00e9"'] = TensorData(dtype, shape, bytes(size))
    state = pack_state(tensors, base_model='m', lora_config=LoraConfig())
    file = build_header(state.manifest.tensors, metadata={'k': 'v'}) + state.data
    seen = {name: (tuple(value['shape']), bytes(value['data'])) for name, value in safetensors.deserialize(file)}
    assert seen == {name: (tensor.shape, tensor.data) for name, tensor in tensors.items()}
    entries, metadata = parse_header(file)
    assert metadata == {'format': 'pt', 'k': 'v'}
    assert {entry.name: file[entry.begin : entry.end] for entry in entries} == {n: t.data for n, t in tensors.items()}


def test_files_of_the_safetensors_library_can_be_read() -> None:
    """The offsets, dtypes and shapes of a file from the safetensors library are parsed correctly."""
    values = {'b': np.arange(6, dtype=np.float32).reshape(2, 3), 'a': np.arange(3, dtype=np.int64)}
    file = safetensors.numpy.save(values)
    entries, _ = parse_header(file)
    assert {e.name: (e.dtype, e.shape, file[e.begin : e.end]) for e in entries} == {
        name: (str(value.dtype), value.shape, value.tobytes()) for name, value in values.items()
    }


def _file(header: Any, *, data: bytes = b'') -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack('<Q', len(text)) + text + data


@pytest.mark.parametrize(
    'file',
    [
        b'',
        b'\xff' * 8,
        _file(b'\xff\xff'),
        _file(b'[' * 10_000),
        _file([]),
        _file({'t': 3}),
        _file({'t': {'dtype': 'F8', 'shape': [], 'data_offsets': [0, 1]}}, data=b'x'),
        _file({'t': {'dtype': 'U8', 'shape': [1], 'data_offsets': [0]}}, data=b'x'),
        _file({'t': {'dtype': 'U8', 'shape': [2], 'data_offsets': [0, 1]}}, data=b'x'),
        _file({'t': {'dtype': 'U8', 'shape': [-1], 'data_offsets': [1, 0]}}, data=b'x'),
        _file({'t': {'dtype': 'U8', 'shape': [True], 'data_offsets': [0, 1]}}, data=b'x'),
        _file({'t': {'dtype': 'U8', 'shape': [1], 'data_offsets': [1, 2]}}, data=b'xy'),
        _file({'t': {'dtype': 'U8', 'shape': [1], 'data_offsets': [0, 1]}}, data=b'xy'),
        _file({'t': {'dtype': 'U8', 'shape': [1], 'data_offsets': [0, 1]}}),
        _file({'__metadata__': 3}),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, file: bytes) -> None:
    """A malformed weights file raises an InvalidPeftFolder that names the file."""
    (tmp_path / ADAPTER_MODEL_FILE).write_bytes(file)
    with pytest.raises(InvalidPeftFolder) as caught:
        read_peft_folder(tmp_path)
    assert caught.value.file_name == ADAPTER_MODEL_FILE


@given(file=st.binary(max_size=200))
def test_parse_header_raises_only_value_errors(file: bytes) -> None:
    """Random bytes are parsed as a file or raise ValueError."""
    try:
        parse_header(file)
        parse_header(_file(file))
    except ValueError:
        pass


CONFIG = {'peft_type': 'LORA', 'r': 4, 'lora_alpha': 8, 'target_modules': ['q_proj']}


@pytest.mark.parametrize(
    'change',
    [
        {'peft_type': 'IA3'},
        {'use_dora': True},
        {'bias': 'all'},
        {'modules_to_save': ['lm_head']},
        {'r': '4'},
        {'r': 0},
        {'lora_alpha': 'x'},
        {'lora_dropout': 2},
        {'target_modules': None},
        {'target_modules': [1]},
        {'rank_pattern': [1]},
        {'rank_pattern': {'q_proj': 'x'}},
        {'use_rslora': 'yes'},
    ],
)
def test_unsupported_configurations_are_refused(change: dict[str, Any]) -> None:
    """An unsupported or invalid field raises a ValueError that names the field."""
    with pytest.raises(ValueError, match=next(iter(change)).split('_', maxsplit=1)[-1]):
        parse_adapter_config(json.dumps({**CONFIG, **change}).encode())


@pytest.mark.parametrize('data', [b'', b'\xff', b'[]', b'{}', b'[' * 10_000, b'{"peft_type": "LORA", "r": 4}'])
def test_malformed_configurations_are_refused(data: bytes) -> None:
    """Bytes that are not a valid LoRA configuration raise ValueError."""
    with pytest.raises(ValueError, match=r'JSON|missing|peft_type'):
        parse_adapter_config(data)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A missing weights or configuration file raises an InvalidPeftFolder that names the file."""
    with pytest.raises(InvalidPeftFolder) as caught:
        read_peft_folder(tmp_path)
    assert caught.value.file_name == ADAPTER_MODEL_FILE
    write_peft_folder(tmp_path / 'a', lora_tensors(), LoraConfig(), base_model='org/tiny')
    (tmp_path / 'a' / ADAPTER_CONFIG_FILE).unlink()
    with pytest.raises(InvalidPeftFolder) as caught:
        read_peft_folder(tmp_path / 'a')
    assert caught.value.file_name == ADAPTER_CONFIG_FILE
