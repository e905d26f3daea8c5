"""Fetches the files of checkpoints from the checkpoint service."""

import asyncio
import shutil
import tarfile
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import IO

from blake3 import blake3

from services.gateway.catalogue.grpc import GrpcCheckpoints
from services.gateway.errors import CheckpointChanged
from services.gateway.exports.ports import ReportBytes
from services.kit.errors import DigestMismatch
from services.kit.ids import new_id

_ARCHIVE = '.archive.tar'


class CheckpointArchives:
    """Implements `ArchiveSource`."""

    def __init__(self, checkpoints: GrpcCheckpoints, *, root: Path) -> None:
        """Fetch through `checkpoints` into `root`, a folder that has no other content."""
        self._checkpoints = checkpoints
        self._root = root

    async def clear(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    @asynccontextmanager
    async def opened(self, path: str, *, digest: str, report: ReportBytes) -> AsyncIterator[Path]:
        folder = self._root / new_id('ar')
        await asyncio.to_thread(folder.mkdir, parents=True)
        try:
            await self._fetch(path, folder, digest=digest, report=report)
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _fetch(self, path: str, folder: Path, *, digest: str, report: ReportBytes) -> None:
        archive = folder / _ARCHIVE
        with await asyncio.to_thread(archive.open, 'wb') as file:
            archive_digest = await self._receive(path, file, report)
        # Checked after the transfer, so that a replacement during the transfer is detected.
        if (await self._checkpoints.get(path)).digest != digest:
            raise CheckpointChanged(path.partition('://')[2])
        await asyncio.to_thread(_unpack, archive, archive_digest)

    async def _receive(self, path: str, file: IO[bytes], report: ReportBytes) -> str:
        digest = ''
        async with aclosing(self._checkpoints.archive(path, offset=0)) as parts:
            async for part in parts:
                await asyncio.to_thread(file.write, part.data)
                digest = part.digest
                report(file.tell(), part.size_bytes)
        return digest


def _unpack(archive: Path, digest: str) -> None:
    hasher = blake3()
    hasher.update_mmap(archive)
    if hasher.hexdigest() != digest:
        raise DigestMismatch(digest, hasher.hexdigest())
    with tarfile.open(archive, mode='r:') as content:
        content.extractall(archive.parent, filter='data')
    archive.unlink()
