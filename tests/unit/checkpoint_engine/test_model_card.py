"""Unit tests of model cards and of the base model that an adapter's folder names."""

import json
import re
import runpy
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from fixtures.checkpoint_service import make_state
from fixtures.tiny_model import HIDDEN, LAYERS, build_tiny_model
from twinkle.checkpoint_engine import (
    ADAPTER_CONFIG_FILE,
    PackedState,
    description_files,
    pack_state,
    shared_files,
    weights_file,
    weights_header,
)
from twinkle.checkpoint_engine.model_card import adapter_card
from twinkle.data_format import LoraConfig, TensorData
from twinkle.hub import CARD_FILE, is_generated


def tiny_adapter(base_model: str) -> PackedState:
    """Return an adapter of a tiny model."""
    a = TensorData('float32', (4, HIDDEN), bytes(16 * HIDDEN))
    b = TensorData('float32', (HIDDEN, 4), bytes(16 * HIDDEN))
    layers = [f'base_model.model.model.layers.{index}.self_attn.q_proj' for index in range(LAYERS)]
    tensors = {f'{layer}.lora_{name}.weight': data for layer in layers for name, data in (('A', a), ('B', b))}
    return pack_state(tensors, base_model=base_model, lora_config=LoraConfig(r=4, target_modules=('q_proj',)))


def files_of(state: PackedState) -> dict[str, bytes]:
    """Return the files of the folder that is downloaded or pushed."""
    files = shared_files(state.manifest, title='best', facts={'run': 'ad-1', 'optimizer steps': '7'})
    return {**files, weights_file(state.manifest): weights_header(state.manifest) + bytes(state.data)}


@pytest.mark.parametrize(
    ('base_model', 'named'),
    [
        ('org/tiny', 'org/tiny'),
        ('hf://org/tiny', 'org/tiny'),
        ('ms://org/tiny', 'org/tiny'),
        ('smollm2-135m-instruct', 'HuggingFaceTB/SmolLM2-135M-Instruct'),
        ('/srv/hf/models--org--tiny/snapshots/c0ffee', 'org/tiny'),
        ('/srv/models/tiny', 'tiny'),
        ('~/models/tiny', 'tiny'),
        ('./tiny', 'tiny'),
    ],
)
def test_folders_name_the_repository_of_the_base_model(base_model: str, named: str) -> None:
    """Stored and shared configurations name the repository or, for other folders, only the name of the folder."""
    manifest = make_state(1, base_model=base_model).manifest
    for files in (description_files(manifest), shared_files(manifest, title='best', facts={})):
        assert json.loads(files[ADAPTER_CONFIG_FILE])['base_model_name_or_path'] == named


def test_card_has_the_front_matter_of_the_hub() -> None:
    """The hub's client reads base model, library, task and tags from the card, and the table has all facts."""
    card = ModelCard(files_of(make_state(1))[CARD_FILE].decode())
    assert card.data.to_dict() == {
        'base_model': 'org/tiny',
        'library_name': 'peft',
        'pipeline_tag': 'text-generation',
        'tags': ['lora', 'peft', 'twinkle'],
    }
    rows = dict(re.findall(r'^\| ([^|]+) \| `(.+)` \|$', card.text, re.MULTILINE))
    assert rows == {'run': 'ad-1', 'optimizer steps': '7', 'rank': '4', 'alpha': '16', 'target modules': 'q_proj'}


def test_generated_cards_are_recognized_until_they_are_edited() -> None:
    """A card counts as generated only with its own signature at the end."""
    card = files_of(make_state(1))[CARD_FILE]
    assert is_generated(card)
    assert not any(map(is_generated, (b'', b'# mine\n', card.replace(b'best', b'good'), card + b'more\n')))


def test_card_of_a_local_base_model_contains_no_path() -> None:
    """A base model without a repository is not in the front matter, and the card does not contain its path."""
    text = files_of(make_state(1, base_model='/srv/models/tiny'))[CARD_FILE].decode()
    assert 'base_model' not in ModelCard(text).data.to_dict()
    assert '/srv' not in text
    assert "base = 'tiny'" in text


def test_markup_in_names_of_modules_stays_in_its_cell() -> None:
    """Backticks and bars in the names of an uploaded adapter's modules do not end their cell."""
    config = LoraConfig(r=4, target_modules=('a`b|c',))
    manifest = pack_state(
        {'base_model.model.a`b|c.lora_A.weight': TensorData('float32', (4, 1), bytes(16))},
        base_model='org/tiny',
        lora_config=config,
    ).manifest
    card = shared_files(manifest, title='best', facts={})[CARD_FILE].decode()
    assert '| target modules | `ab/c` |' in card


def test_program_of_the_card_loads_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's program, run in the adapter's folder, loads base model, adapter and tokenizer."""
    for name, data in files_of(tiny_adapter('hf://org/tiny')).items():
        (tmp_path / name).write_bytes(data)
    # Transformers prefers a folder with the name of the repository.
    build_tiny_model(tmp_path / 'org' / 'tiny')
    (program,) = re.findall(r'```python\n(.*?)```', (tmp_path / CARD_FILE).read_text(), re.DOTALL)
    (tmp_path / 'program.py').write_text(program)
    monkeypatch.chdir(tmp_path)
    loaded = runpy.run_path('program.py')
    assert loaded['model'].active_peft_config.r == 4
    assert loaded['tokenizer']('a').input_ids


def test_values_cannot_leave_their_cell() -> None:
    """Names that a tenant chose stay inside one cell of the table."""
    config = LoraConfig(r=4, target_modules='a`|\n\n# Title\r\n<b>')
    card = adapter_card(config, title='best', base_model='org/tiny', facts={}).decode()
    assert '| target modules | `a/ # Title <b>` |\n' in card
