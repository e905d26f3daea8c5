"""The output of a running recipe on a terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from fixtures.source_tree import ROOT

RUN = """
import sys
from pathlib import Path
from dataclasses import make_dataclass
from examples.cookbook.curves import Curves
from examples.cookbook.recipe import Recipe
recipe = Recipe(name='progress', setting=make_dataclass('Setting', [])(), seed=0, out=Path(sys.argv[1]))
with Curves(recipe, title='many numbers', total_steps=3, plotted=['reward']) as curves:
    for step in range(3):
        curves.record(reward=step / 4, **{f'a_number_with_a_long_name_{index}': index for index in range(12)})
"""
"""Program that replaces a recipe. All recipes show their progress with `Curves`."""


def read(terminal: int) -> bytes:
    """Return the next output, or an empty text at the end, where Linux raises an error."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b''


def output_on_a_terminal(command: list[str]) -> str:
    """Return the output of a program on a terminal of 80 columns."""
    parent, child = pty.openpty()
    environment = {**os.environ, 'TERM': 'xterm', 'COLUMNS': '80', 'LINES': '30'}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=child, stderr=child) as process:
        os.close(child)
        output = b''.join(iter(lambda: read(parent), b''))
    os.close(parent)
    assert process.returncode == 0, output
    return output.decode()


def test_progress_bar_fits_with_many_numbers(tmp_path: Path) -> None:
    """A narrow terminal shows the bar, the step count and the plotted numbers; the file has all numbers."""
    output = output_on_a_terminal([sys.executable, '-c', RUN, str(tmp_path)])
    assert '3/3' in output
    assert '━━━━' in output
    assert 'reward 0.5' in output
    assert (tmp_path / 'curves.jsonl').read_text().count('a_number_with_a_long_name_11') == 3
