"""Folders in the cache are built once and are always complete."""

import threading
from pathlib import Path

import pytest

from twinkle.hub.cache import build_once


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv('TWINKLE_CACHE_DIR', str(tmp_path))
    return tmp_path


def test_failed_build_leaves_nothing(cache: Path) -> None:
    """A failed build leaves no folder, and the next build succeeds."""

    def fail(folder: Path) -> None:
        (folder / 'half').write_text('x')
        raise RuntimeError

    with pytest.raises(RuntimeError):
        build_once(cache / 'models/x', fail)
    assert list((cache / 'models').iterdir()) == []
    assert build_once(cache / 'models/x', lambda folder: None).is_dir()


def test_concurrent_builders_build_once(cache: Path) -> None:
    """If two threads need the same folder, it is built once."""
    calls: list[Path] = []
    is_building = threading.Event()
    may_finish = threading.Event()

    def build(folder: Path) -> None:
        calls.append(folder)
        is_building.set()
        may_finish.wait(10)
        (folder / 'file').write_text('x')

    first, second = (threading.Thread(target=build_once, args=(cache / 'models/x', build)) for _ in range(2))
    first.start()
    assert is_building.wait(10)
    second.start()
    may_finish.set()
    first.join(10)
    second.join(10)
    assert len(calls) == 1
    assert (cache / 'models/x/file').read_text() == 'x'


def test_leftovers_of_a_failed_process_are_removed(cache: Path) -> None:
    """A build removes temporary folders of a process that failed."""
    leftover = cache / 'models/.x-dead'
    leftover.mkdir(parents=True)
    build_once(cache / 'models/x', lambda folder: None)
    assert [path.name for path in (cache / 'models').iterdir()] == ['x']
