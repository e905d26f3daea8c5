"""Runs the example programs of docs/rollouts.md on a tiny model."""

import re
from pathlib import Path
from typing import Any

import pytest

from fixtures.source_tree import ROOT

BLOCK = re.compile(r'^```python\n(.*?)^```', re.MULTILINE | re.DOTALL)


def run(model: Path, folder: Path) -> dict[str, Any]:
    """Run the document's programs and return their variables."""
    names: dict[str, Any] = {'MODEL': str(model), 'FOLDER': str(folder), '__name__': 'document'}
    blocks = BLOCK.findall((ROOT / 'docs' / 'rollouts.md').read_text())
    exec(compile('\n'.join(blocks), 'docs/rollouts.md', 'exec'), names)
    return names


@pytest.mark.timeout(300)
def test_the_documents_programs_run_and_are_reproducible(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The programs run, no batch exceeds the staleness limit, and a second run gives the same curve."""
    first, second = run(tiny_llama_dir, tmp_path / 'first'), run(tiny_llama_dir, tmp_path / 'second')
    assert first['first'].turn_count >= 1
    assert [numbers['staleness/max'] for numbers in first['curve']] == [0.0, 1.0, 1.0, 1.0]
    assert [numbers['staleness/dropped'] for numbers in first['curve']] == [0.0] * 4
    assert first['curve'] == second['curve']
