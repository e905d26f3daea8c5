"""Processes that read the rows of hub datasets, and end in unusual ways."""

import subprocess
import sys
from contextlib import closing
from tempfile import TemporaryDirectory

from twinkle_services.data.backends.hub_rows import RowProcess

PROGRAM = """
import os, signal
os.write(1, b'r{"x": 1}\\nr{"x": 2}\\n.null\\n')
os.kill(os.getpid(), signal.SIGKILL)
"""


class CrashedProcess(RowProcess):
    """A process that has written all rows, and was then ended by a signal."""

    def __init__(self) -> None:
        self._name = 'org/rows'
        self._cache = TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, '-c', PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._process.wait()


def test_rows_of_a_process_that_crashes_at_its_end_are_kept() -> None:
    """A crash after the last row, such as one of a library while the interpreter ends, loses no rows."""
    with closing(CrashedProcess()) as process:
        process.raise_failure()
        assert [*process.rows()] == [{'x': 1}, {'x': 2}]
