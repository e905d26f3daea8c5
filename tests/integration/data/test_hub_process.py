"""Processes that read datasets of a hub end with their service, and leave no files."""

import os
import subprocess
import sys
from pathlib import Path

WRITER = """
import os, threading
from pathlib import Path
from twinkle_services.data.backends.hub_process import end_with_service
threading.Thread(target=end_with_service, daemon=True).start()
folder = Path(os.environ['HF_DATASETS_CACHE'])
number = 0
while True:
    (folder / str(number % 7)).mkdir(parents=True, exist_ok=True)
    (folder / str(number % 7) / str(number % 500)).touch()
    number += 1
    if number == 2000:
        print(flush=True)
"""


def test_a_process_that_writes_leaves_no_files(tmp_path: Path) -> None:
    """The folder of a process is removed at the end of its input, although another thread writes to the folder."""
    folder = tmp_path / 'cache'
    environment = {**os.environ, 'HF_DATASETS_CACHE': str(folder)}
    with subprocess.Popen(
        [sys.executable, '-c', WRITER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.close()
        process.wait(timeout=120)
    assert not folder.exists()
