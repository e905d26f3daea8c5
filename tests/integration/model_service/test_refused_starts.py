"""Tests of starts of the model service that are refused with a message and without a traceback."""

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.standalone_model import running_model


def _refusal(state_dir: Path, base_model: Path) -> str:
    """Start the service with a state folder, and return its stderr after it exits with status 1."""
    words = {'base_model': base_model, 'state_dir': state_dir, 'checkpoint_address': '127.0.0.1:1'}
    arguments = [word for name, value in words.items() for word in ('--set', f'{name}={value}')]
    done = subprocess.run(
        [sys.executable, '-m', 'twinkle_services.model', *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
def test_adapters_of_a_different_base_model_are_refused(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """A service whose journal has an adapter of another base model exits with a message that names both models."""
    state_dir = tmp_path / 'state'
    with running_model(str(tiny_llama_dir)) as model:
        model.create(lora_rank=2)
        shutil.copytree(model.state_dir, state_dir)
    other = shutil.copytree(tiny_llama_dir, tmp_path / 'other')
    message = _refusal(state_dir, other)
    assert str(tiny_llama_dir) in message
    assert str(other) in message
    assert 'Traceback' not in message


@pytest.mark.slow
def test_folder_instead_of_a_journal_is_reported_with_the_cause(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """If the path of the journal's database is a folder, the message has the path and SQLite's error."""
    journal = tmp_path / 'journal' / 'journal.sqlite'
    journal.mkdir(parents=True)
    with pytest.raises(sqlite3.Error) as raised:
        sqlite3.connect(journal)
    message = _refusal(tmp_path, tiny_llama_dir)
    assert str(journal) in message
    assert str(raised.value) in message
    assert 'Traceback' not in message
