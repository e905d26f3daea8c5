"""States that do not fit on the disk are refused before any data is written."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.checkpoint_service import make_state
from twinkle.checkpoint_engine import WeightManifest, iter_chunks
from twinkle_services.checkpoint.backends.disk import open_disk
from twinkle_services.checkpoint.backends.folder_store import FolderStore
from twinkle_services.checkpoint.domain import AdapterKey, CheckpointKey, VersionKey
from twinkle_services.kit.errors import DiskFull
from twinkle_services.kit.worker import Threads

ADAPTER = AdapterKey('alice', 'ad-1')
STATE = make_state(1)


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Threads of the store."""
    threads = Threads('store', count=1)
    yield threads
    threads.close()


def huge_manifest() -> WeightManifest:
    """Return the manifest of a state that is larger than any disk."""
    (first, *_) = STATE.manifest.tensors
    entry = replace(first, shape=(1 << 40, 1 << 18), size_bytes=1 << 60)
    return replace(STATE.manifest, tensors=(entry,), size_bytes=1 << 60)


@pytest.mark.parametrize('key', [VersionKey(ADAPTER, 1), CheckpointKey(ADAPTER, 'final')])
async def test_state_that_does_not_fit_on_the_disk_is_refused(
    tmp_path: Path, threads: Threads, key: VersionKey | CheckpointKey
) -> None:
    """The first chunk of a state that exceeds the free space is refused, and no file is created."""
    writer = FolderStore(open_disk(str(tmp_path)), threads).begin(key, huge_manifest())
    (chunk, *_) = iter_chunks(STATE.data)
    with pytest.raises(DiskFull) as caught:
        await writer.add(chunk)
    assert caught.value.needed_bytes == 1 << 60
    await writer.discard()
    assert open_disk(str(tmp_path)).names('states') == []
