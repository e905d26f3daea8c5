"""Transfers of exports: archives from the checkpoint service, and folders to a hub or to the operator's folder."""

import asyncio
import json
import os
import shutil
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from twinkle.hub import CARD_FILE, is_generated
from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.errors import CheckpointChanged, HubRefused
from twinkle_services.gateway.exports.rules import SentFolder, Target
from twinkle_services.kit.errors import DigestMismatch, InvalidField, NotSupportedHere, ServiceUnreachable
from twinkle_services.kit.ids import new_id

ReportBytes = Callable[[int, int], None]
"""Receives the number of bytes of an archive that have been read, and the size of the archive in bytes."""
_ARCHIVE = '.archive.tar'
_NOT_INHERITED = ('HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'HF_TOKEN_PATH')
"""Environment variables from which the hub's client would read a token of the operator."""
_SETTINGS = {'HF_HUB_DISABLE_IMPLICIT_TOKEN': '1', 'HF_HUB_DISABLE_TELEMETRY': '1', 'HF_HUB_DISABLE_PROGRESS_BARS': '1'}


class CheckpointArchives:
    """Fetches checkpoints for the current caller to the local disk."""

    def __init__(self, checkpoints: GrpcCheckpoints, *, root: Path) -> None:
        """Fetch through `checkpoints` into `root`, a folder that has no other content."""
        self._checkpoints = checkpoints
        self._root = root

    async def clear(self) -> None:
        """Delete the files of earlier processes. Call this only while no folder is open."""
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    @asynccontextmanager
    async def opened(self, path: str, *, digest: str, report: ReportBytes) -> AsyncIterator[Path]:
        """Provide a folder with a checkpoint's files in PEFT format; the folder is deleted at the end of the block.

        Raises:
            CheckpointChanged: the checkpoint no longer has that digest.
            DigestMismatch: the received archive is damaged.
            DomainError: the checkpoint service refused a call or failed.
            OSError: the local disk failed.
        """
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
        # The digest is checked after the transfer, so that a replacement during the transfer is detected.
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


class ExportTargets:
    """Sends folders to hubs and to the operator's folder. Cancelling `send` kills an upload, but not a copy."""

    def __init__(self, *, root: Path | None, seconds: float) -> None:
        """Send to subfolders of `root`, one per tenant; None disables folders. `seconds` limits one upload to a hub."""
        self._root = root
        self._seconds = seconds

    def check(self, target: Target) -> None:
        """Check that the gateway can export to a target of this kind.

        Raises:
            NotSupportedHere: the operator has not enabled exports to folders.
        """
        if target.kind == 'file' and self._root is None:
            raise NotSupportedHere('an export to a folder (the operator can set exports.folder)', 'gateway')

    async def send(self, folder: Path, target: Target, *, tenant_id: str, token: str, is_private: bool) -> SentFolder:
        """Send the files of a folder to a target; sending the same files again changes nothing.

        Raises:
            NotSupportedHere: the operator has not enabled exports to folders.
            HubRefused: the hub refuses the upload permanently.
            InvalidField: existing files or folders prevent the export.
            ServiceUnreachable: the upload to the hub failed for another reason, or took too long; a retry may succeed.
            OSError: the local disk failed.
        """
        self.check(target)
        if target.kind == 'file' and self._root is not None:
            try:
                return await asyncio.to_thread(_copy, folder, self._root / tenant_id / target.name)
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise InvalidField('target', 'conflicts with an existing file or folder; choose another') from error
        hub_id = f'{target.kind}://{target.name}'
        job = {'folder': str(folder), 'target': hub_id, 'token': token, 'is_private': is_private}
        result = await self._upload(json.dumps(job).encode())
        if result.get('failure') == 'refused':
            raise HubRefused(hub_id)
        if 'url' not in result:
            raise ServiceUnreachable('hub')
        return SentFolder(result['url'], result['commit'])

    async def _upload(self, job: bytes) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            '-m',
            'twinkle_services.gateway.exports.hub_process',
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # The hub's client may print the token.
            stderr=asyncio.subprocess.DEVNULL,
            env={**environment, **_SETTINGS},
        )
        try:
            async with asyncio.timeout(self._seconds):
                output, _ = await process.communicate(job)
            return json.loads(output)
        except (TimeoutError, ValueError):
            return {}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _copy(source: Path, target: Path) -> SentFolder:
    """Copy all files of a folder, each atomically. An edited card in the target folder is not replaced."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        card = target / CARD_FILE
        if file.name == CARD_FILE and card.is_file() and not is_generated(card.read_bytes()):
            continue
        staging = target / f'.{new_id("part")}'
        try:
            shutil.copyfile(file, staging)
            staging.replace(target / file.name)
        finally:
            staging.unlink(missing_ok=True)
    return SentFolder(target.resolve().as_uri())
