"""What a person at a terminal sees of a recipe that runs."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from fixtures.source_tree import ROOT

RUN = """
import sys
from pathlib import Path
from examples.cookbook.curves import Curves
with Curves(Path(sys.argv[1]), title='many numbers', total_steps=3, plotted=['reward']) as curves:
    for step in range(3):
        curves.record(reward=step / 4, **{f'a_number_with_a_long_name_{place}': place for place in range(12)})
"""
"""Stands for a recipe, since all of them show themselves so."""


def read(terminal: int) -> bytes:
    """Return what was written; nothing where nobody can write any more, which is an error on Linux."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b''


def shown_on_a_terminal(command: list[str]) -> str:
    """Return what a program writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, 'TERM': 'xterm', 'COLUMNS': '80', 'LINES': '30'}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b''.join(iter(lambda: read(ours), b''))
    os.close(ours)
    assert process.returncode == 0, shown
    return shown.decode()


def test_a_bar_has_room_beside_many_numbers(tmp_path: Path) -> None:
    """How many steps are done and what is drawn are seen on a narrow terminal; the files have all numbers."""
    shown = shown_on_a_terminal([sys.executable, '-c', RUN, str(tmp_path)])
    assert '3/3' in shown
    assert '━━━━' in shown
    assert 'reward 0.5' in shown
    assert (tmp_path / 'curves.jsonl').read_text().count('a_number_with_a_long_name_11') == 3
