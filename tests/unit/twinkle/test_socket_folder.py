"""Folders for sockets are private, and are removed by their process or by a later one."""

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from twinkle.socket_folder import SocketFolder

pytestmark = pytest.mark.timeout(60)

OWNER = """
import sys
from pathlib import Path
from twinkle.socket_folder import SocketFolder
folder = SocketFolder('one-', parent=Path(sys.argv[1]))
(folder.path / 'rpc').touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


UNLOCKABLE = """
import errno, os, sys
from pathlib import Path
from twinkle.socket_folder import SocketFolder

def refuse(event, arguments):
    if event == 'fcntl.flock' and os.readlink(f'/proc/self/fd/{arguments[0]}').startswith(sys.argv[1]):
        raise OSError(getattr(errno, sys.argv[2]), 'refused')

sys.addaudithook(refuse)
try:
    folder = SocketFolder('twinkle-test-')
    print(folder.path.parent)
    folder.remove()
except OSError as error:
    print(error.strerror)
"""
"""Program in which locks below a folder fail with an error, as on a file system without locks."""


def make_old(path: Path) -> None:
    """Set the folder's time of change to the distant past."""
    os.utime(path, (0, 0))


def test_folder_is_private_and_removed(tmp_path: Path) -> None:
    """Only the user can enter the folder, and removing it twice has no effect."""
    folder = SocketFolder('one-', parent=tmp_path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == stat.S_IRWXU
    (folder.path / 'rpc').touch()
    folder.remove()
    assert not folder.path.exists()
    folder.remove()


def test_socket_fits_below_a_long_temporary_folder(tmp_path: Path) -> None:
    """A socket with the longest name that is used, a UUID, has a path that the system accepts."""
    long = tmp_path / ('a' * 60)
    long.mkdir()
    program = (
        "from twinkle.socket_folder import SocketFolder as F; f = F('twinkle-console-'); print(f.path); f.remove()"
    )
    environment = {**os.environ, 'TMPDIR': str(long)}
    printed = subprocess.check_output([sys.executable, '-c', program], env=environment, text=True)
    assert len(os.fsencode(Path(printed.strip()) / ('0' * 36))) < 100


def test_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """A folder stays while its process runs, and the next process removes it after a kill, not those of other kinds."""
    owner = subprocess.Popen(
        [sys.executable, '-c', OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        make_old(path)
        SocketFolder('one-', parent=tmp_path).remove()
        assert path.exists()
        owner.send_signal(signal.SIGKILL)
    other = tmp_path / 'two-folder'
    other.mkdir()
    make_old(other)
    SocketFolder('one-', parent=tmp_path).remove()
    assert not path.exists()
    assert other.exists()


def test_new_and_linked_folders_are_kept(tmp_path: Path) -> None:
    """A folder may be new and not locked yet, and a link may lead to any folder."""
    new, target = tmp_path / 'one-new', tmp_path / 'target'
    for path in (new, target):
        path.mkdir()
    (target / 'data').touch()
    make_old(target)
    (tmp_path / 'one-link').symlink_to(target)
    SocketFolder('one-', parent=tmp_path).remove()
    assert new.exists()
    assert (target / 'data').exists()


def test_forked_child_keeps_the_folder(tmp_path: Path) -> None:
    """A forked child that exits normally does not remove the folder of its parent."""
    folder = SocketFolder('one-', parent=tmp_path)
    child = multiprocessing.get_context('fork').Process(target=folder.remove)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert folder.path.exists()
    folder.remove()


@pytest.mark.parametrize('error', ['ENOTSUP', 'ENOLCK'])
def test_temporary_folder_without_locks_is_not_used(error: str) -> None:
    """The folder is below /tmp if the temporary folder has no locks; the error of a /tmp without locks has a cure."""
    with tempfile.TemporaryDirectory(dir='/tmp') as folder:
        environment = {**os.environ, 'TMPDIR': folder}
        printed = [
            subprocess.check_output([sys.executable, '-c', UNLOCKABLE, path, error], env=environment, text=True)
            for path in (folder, '/tmp', '/none')
        ]
        assert os.listdir(folder) == []  # noqa: PTH208 (names)
    assert [printed[0].strip(), printed[2].strip()] == ['/tmp', folder]
    assert 'set TMPDIR' in printed[1]
