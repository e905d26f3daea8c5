"""Runs the example programs of docs/parts.md."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import twinkle
from twinkle.kernel import BACKENDS, OPERATIONS

DOCUMENT = (Path(__file__).parents[3] / 'docs' / 'parts.md').read_text(encoding='utf-8')
PROGRAMS = re.findall(r'^```python\n(.*?)^```$', DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / 'models' / 'org').mkdir(parents=True)
    (tmp_path / 'models' / 'org' / 'tiny').symlink_to(tiny_llama_dir)
    monkeypatch.setenv('TWINKLE_HUB_DIR', str(tmp_path))
    monkeypatch.setenv('TWINKLE_PLUGINS', '')
    monkeypatch.setenv('TWINKLE_TRUST_REMOTE_CODE', '0')
    yield
    twinkle.initialize()


@pytest.mark.parametrize('program', PROGRAMS, ids=range(len(PROGRAMS)))
def test_program_runs(program: str) -> None:
    """Each program runs in isolation and its assertions hold."""
    exec(compile(program, 'docs/parts.md', 'exec'), {})


def test_the_document_names_every_kernel() -> None:
    """The document names all kernel operations and backends and contains six programs."""
    assert [name for name in (*OPERATIONS, *BACKENDS) if name not in DOCUMENT] == []
    assert len(PROGRAMS) == 6
