"""The files of checkpoints, fetched from the checkpoint service."""

import asyncio
import tarfile
from contextlib import aclosing
from pathlib import Path
from typing import IO

from blake3 import blake3

from services.gateway.backends.grpc_checkpoints import GrpcCheckpoints
from services.gateway.domain.errors import CheckpointChanged
from services.gateway.ports.exports import ReportBytes
from services.kit.errors import DigestMismatch

_ARCHIVE = '.archive.tar'


class CheckpointArchives:
    """Implements `ports.ArchiveSource`."""

    def __init__(self, keeper: GrpcCheckpoints) -> None:
        """Ask `keeper`, for the current caller."""
        self._keeper = keeper

    async def fetch(self, path: str, folder: Path, *, digest: str, report: ReportBytes) -> None:
        """Write the files of a checkpoint into a folder; see the port."""
        archive = folder / _ARCHIVE
        with await asyncio.to_thread(archive.open, 'wb') as file:
            told = await self._receive(path, file, report)
        # Asked after the bytes came: what was replaced meanwhile is seen, too.
        if (await self._keeper.get(path)).digest != digest:
            raise CheckpointChanged(path.partition('://')[2])
        await asyncio.to_thread(_unpack, archive, told)

    async def _receive(self, path: str, file: IO[bytes], report: ReportBytes) -> str:
        digest = ''
        async with aclosing(self._keeper.archive(path, offset=0)) as parts:
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
