"""Segments of shared memory: handed over by name, never anything else, and nothing is left behind."""

import gc
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.kit.errors import MemoryNotShared
from services.kit.weights import SegmentRef, Segments, SegmentsConfig, open_segments


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where segments lie."""
    return tmp_path / 'segments'


def left(folder: Path) -> set[str]:
    """Return the names of everything that holds bytes of a state."""
    gc.collect()
    return {path.name for path in folder.iterdir() if path.name != 'host' and not path.name.startswith('owner-')}


def test_a_segment_is_handed_over_and_outlives_its_makers_name(folder: Path) -> None:
    """The receiver has a name of its own, read-only, for as long as any view of the bytes lives."""
    sender, receiver = Segments(folder), Segments(folder)
    assert sender.host_id == receiver.host_id
    made = sender.create(5)
    made.data[:] = b'bytes'
    taken = receiver.adopt(made.ref)
    made.remove()
    view = taken.data[1:]
    path = Path(taken.path)
    assert view.readonly
    del taken
    gc.collect()
    assert (bytes(view), path.read_bytes()) == (b'ytes', b'bytes')
    del view
    assert left(folder) == set()


def test_segments_vanish_with_their_last_view(folder: Path) -> None:
    """Also where nobody removed them, as after a cancelled publish."""
    segments = Segments(folder)
    made = segments.create(8)
    assert len(left(folder)) == 1
    del made
    assert left(folder) == set()


def test_kept_segments_outlive_the_process(folder: Path) -> None:
    """Their owner opens them by name after a restart; others do not sweep them."""
    first = Segments(folder)
    loose = first.create(3)
    loose.data[:] = b'abc'
    first.adopt(loose.ref, kept_name='v-1')
    del first, loose
    assert left(folder) == {'keep.v-1'}
    second = Segments(folder)
    assert second.kept_names() == ['v-1']
    assert bytes(second.open_kept('v-1', 3).data) == b'abc'
    with pytest.raises(MemoryNotShared):
        second.open_kept('v-1', 4)
    with pytest.raises(FileExistsError):
        second.create(3, kept_name='v-1')
    second.remove_kept('v-1')
    second.remove_kept('v-1')
    assert left(folder) == set()


@pytest.mark.parametrize('name', ['../x', '/etc/passwd', '..', '.', '', 'a/b', 'x\0y', 'a' * 300, 'ab\n', 'missing'])
def test_hostile_names_open_nothing(folder: Path, name: str) -> None:
    """A path is no name, wherever it leads."""
    (folder.parent / 'x').write_bytes(b'secret')
    segments = Segments(folder)
    with pytest.raises(MemoryNotShared):
        segments.adopt(SegmentRef(segments.host_id, name, 6))
    assert left(folder) == set()


def test_links_folders_and_other_sizes_are_no_segments(folder: Path) -> None:
    """What was put there to be followed, read without end, or shorter than announced is refused and not kept."""
    secret = folder.parent / 'secret'
    secret.write_bytes(b'secret')
    segments = Segments(folder)
    made = segments.create(6)
    (folder / 'link').symlink_to(secret)
    (folder / 'folder').mkdir()
    os.mkfifo(folder / 'pipe')
    (folder / 'short').write_bytes(b'abc')
    names = ['link', 'folder', 'pipe', 'short', 'host']
    for ref in [SegmentRef(segments.host_id, name, 6) for name in names] + [
        replace(made.ref, size_bytes=7),
        replace(made.ref, size_bytes=0),
        replace(made.ref, size_bytes=-1),
        replace(made.ref, host_id='0' * 32),
    ]:
        with pytest.raises(MemoryNotShared):
            segments.adopt(ref)
    assert left(folder) == {made.ref.name, 'link', 'folder', 'pipe', 'short'}


def test_a_folder_of_others_is_not_used(folder: Path) -> None:
    """Whoever else could write there could put anything in a segment's place."""
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError):
        Segments(folder)
    link = folder.parent / 'link'
    link.symlink_to(folder)
    with pytest.raises(NotADirectoryError):
        Segments(link)


def test_what_does_not_fit_is_refused_and_leaves_nothing(folder: Path) -> None:
    """Memory is taken when the segment is made, so that writing to it cannot fail."""
    segments = Segments(folder)
    with pytest.raises(OSError, match=r'.'):  # which one depends on the file system
        segments.create(1 << 60)
    assert left(folder) == set()


def test_parts_are_written_one_after_the_other(folder: Path) -> None:
    """However many there are, empty ones among them; the result is read-only, and gone with its last view."""
    segments = Segments(folder)
    parts = [bytes([number % 256]) * (number % 5) for number in range(2000)]
    made = segments.write([*parts, memoryview(b'end')])
    assert bytes(made.data) == b''.join(parts) + b'end'
    assert made.data.readonly
    assert bytes(Segments(folder).adopt(made.ref).data) == bytes(made.data)
    made.let_go()
    assert left(folder) == set()


def test_parts_that_find_no_room_leave_nothing(folder: Path) -> None:
    """Also where some of them had been written."""
    segments = Segments(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match=r'.'):  # which one depends on what ran out
            segments.write([bytes(4000), bytes(4000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left(folder) == set()


def test_memory_that_cannot_be_shared_is_told_of(tmp_path: Path) -> None:
    """Weights go as bytes then, and whoever runs the service learns which folder is to blame, and the cure."""
    folder = tmp_path / f'twinkle-{os.geteuid()}'
    folder.mkdir()
    folder.chmod(0o777)
    with capture_logs() as logs:
        assert open_segments(SegmentsConfig(), memory=tmp_path) is None
    assert [(entry['log_level'], entry['folder'], bool(entry['cure'])) for entry in logs] == [
        ('warning', str(folder), True)
    ]
    folder.chmod(0o700)
    assert open_segments(SegmentsConfig(), memory=tmp_path) is not None


def test_sharing_can_be_switched_off_and_put_elsewhere(folder: Path) -> None:
    """As the configuration says."""
    assert open_segments(SegmentsConfig(is_enabled=False)) is None
    opened = open_segments(SegmentsConfig(folder=str(folder)))
    assert opened is not None
    assert opened.folder == folder
