"""Shared-memory segments: transfer by name, checks of names, and removal."""

import gc
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fixtures.tiers import mostly_slow
from twinkle_services.kit.errors import MemoryNotShared
from twinkle_services.kit.weights import SegmentRef, Segments, SegmentsConfig, open_segments


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of the segments."""
    return tmp_path / 'segments'


def remaining_files(folder: Path) -> set[str]:
    """Return the names of all files except those of the host id and the owners."""
    gc.collect()
    return {path.name for path in folder.iterdir() if path.name != 'host' and not path.name.startswith('owner-')}


def test_adopted_segment_outlives_the_name_of_its_creator(folder: Path) -> None:
    """The receiver has a read-only link to the segment until the last view of its bytes is gone."""
    sender, receiver = Segments(folder), Segments(folder)
    assert sender.host_id == receiver.host_id
    created = sender.create(5)
    created.data[:] = b'bytes'
    adopted = receiver.adopt(created.ref)
    created.remove()
    view = adopted.data[1:]
    path = Path(adopted.path)
    assert view.readonly
    del adopted
    gc.collect()
    assert (bytes(view), path.read_bytes()) == (b'ytes', b'bytes')
    del view
    assert remaining_files(folder) == set()


def test_segment_is_removed_with_its_last_view(folder: Path) -> None:
    """A segment is removed with its last view, for example after a cancelled publish."""
    segments = Segments(folder)
    created = segments.create(8)
    assert len(remaining_files(folder)) == 1
    del created
    assert remaining_files(folder) == set()


def test_persistent_segments_outlive_the_process(folder: Path) -> None:
    """A persistent segment can be opened by name after a restart, and other processes do not remove it."""
    first = Segments(folder)
    temporary = first.create(3)
    temporary.data[:] = b'abc'
    first.adopt(temporary.ref, persistent_name='v-1')
    del first, temporary
    assert remaining_files(folder) == {'keep.v-1'}
    second = Segments(folder)
    assert second.persistent_names() == ['v-1']
    assert bytes(second.open_persistent('v-1', 3).data) == b'abc'
    with pytest.raises(MemoryNotShared):
        second.open_persistent('v-1', 4)
    with pytest.raises(FileExistsError):
        second.create(3, persistent_name='v-1')
    second.remove_persistent('v-1')
    second.remove_persistent('v-1')
    assert remaining_files(folder) == set()


@pytest.mark.parametrize(
    'name', mostly_slow(['../x', '/etc/passwd', '..', '.', '', 'a/b', 'x\0y', 'a' * 300, 'ab\n', 'missing'], kept=2)
)
def test_invalid_names_are_refused(folder: Path, name: str) -> None:
    """Paths, invalid names and names of missing segments are refused."""
    (folder.parent / 'x').write_bytes(b'secret')
    segments = Segments(folder)
    with pytest.raises(MemoryNotShared):
        segments.adopt(SegmentRef(segments.host_id, name, 6))
    assert remaining_files(folder) == set()


def test_links_folders_and_wrong_sizes_are_refused(folder: Path) -> None:
    """Links, folders, pipes and files of a different size are refused and leave no files behind."""
    secret = folder.parent / 'secret'
    secret.write_bytes(b'secret')
    segments = Segments(folder)
    created = segments.create(6)
    (folder / 'link').symlink_to(secret)
    (folder / 'folder').mkdir()
    os.mkfifo(folder / 'pipe')
    (folder / 'short').write_bytes(b'abc')
    names = ['link', 'folder', 'pipe', 'short', 'host']
    for ref in [SegmentRef(segments.host_id, name, 6) for name in names] + [
        replace(created.ref, size_bytes=7),
        replace(created.ref, size_bytes=0),
        replace(created.ref, size_bytes=-1),
        replace(created.ref, host_id='0' * 32),
    ]:
        with pytest.raises(MemoryNotShared):
            segments.adopt(ref)
    assert remaining_files(folder) == {created.ref.name, 'link', 'folder', 'pipe', 'short'}


def test_folder_that_others_can_write_is_refused(folder: Path) -> None:
    """A folder that other users can write to is refused, and so is a symbolic link to a folder."""
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError):
        Segments(folder)
    link = folder.parent / 'link'
    link.symlink_to(folder)
    with pytest.raises(NotADirectoryError):
        Segments(link)


def test_segment_without_enough_memory_is_refused(folder: Path) -> None:
    """A segment that is larger than the available memory is refused when it is created, and leaves no file."""
    segments = Segments(folder)
    with pytest.raises(OSError, match=r'.'):  # the error depends on the file system
        segments.create(1 << 60)
    assert remaining_files(folder) == set()


def test_parts_are_concatenated(folder: Path) -> None:
    """Any number of parts, including empty ones, are concatenated in a read-only segment."""
    segments = Segments(folder)
    parts = [bytes([number % 256]) * (number % 5) for number in range(2000)]
    created = segments.write([*parts, memoryview(b'end')])
    assert bytes(created.data) == b''.join(parts) + b'end'
    assert created.data.readonly
    assert bytes(Segments(folder).adopt(created.ref).data) == bytes(created.data)
    created.release()
    assert remaining_files(folder) == set()


def test_parts_without_enough_memory_leave_no_file(folder: Path) -> None:
    """A failed write removes the segment, even if some parts were written."""
    segments = Segments(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match=r'.'):  # the error depends on the exhausted resource
            segments.write([bytes(4000), bytes(4000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert remaining_files(folder) == set()


def test_unusable_default_folder_is_logged(tmp_path: Path) -> None:
    """If the default folder is unusable, sharing is disabled, and a warning names the folder and the fix."""
    folder = tmp_path / f'twinkle-{os.geteuid()}'
    folder.mkdir()
    folder.chmod(0o777)
    with capture_logs() as logs:
        assert open_segments(SegmentsConfig(), memory=tmp_path) is None
    assert [(entry['log_level'], entry['folder'], bool(entry['advice'])) for entry in logs] == [
        ('warning', str(folder), True)
    ]
    folder.chmod(0o700)
    assert open_segments(SegmentsConfig(), memory=tmp_path) is not None


def test_sharing_is_configurable(folder: Path) -> None:
    """Sharing can be disabled, and the folder can be configured."""
    assert open_segments(SegmentsConfig(is_enabled=False)) is None
    opened = open_segments(SegmentsConfig(folder=str(folder)))
    assert opened is not None
    assert opened.folder == folder
