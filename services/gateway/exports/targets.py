"""Where exports go: a folder of the operator's, and hubs."""

import asyncio
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.errors import HubRefused
from services.gateway.exports.rules import Target
from services.kit.errors import InvalidField, NotSupportedHere, ServiceUnreachable
from services.kit.ids import new_id

_NOT_INHERITED = ('HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'HF_TOKEN_PATH')
"""Variables by which the hub's client would find a token that is not the tenant's."""
_SETTINGS = {'HF_HUB_DISABLE_IMPLICIT_TOKEN': '1', 'HF_HUB_DISABLE_TELEMETRY': '1', 'HF_HUB_DISABLE_PROGRESS_BARS': '1'}


@dataclass(frozen=True)
class SentFolder:
    """Where a folder went."""

    url: str
    commit: str = ''


class ExportTargets:
    """Implements `ports.Destination`."""

    def __init__(self, *, root: Path | None, seconds: float) -> None:
        """Send to hubs, and into `root`.

        Args:
            root: each tenant has a folder of its own name there; None: nothing is written to folders.
            seconds: how long one upload may take.
        """
        self._root = root
        self._seconds = seconds

    def check(self, target: Target) -> None:
        """Check that there is a folder to write to; see the port."""
        if target.kind == 'file' and self._root is None:
            raise NotSupportedHere('an export to a folder, for which the operator sets exports.folder', 'gateway')

    async def send(self, folder: Path, target: Target, *, tenant_id: str, token: str, is_private: bool) -> SentFolder:
        """Put the files of a folder there; see the port."""
        self.check(target)
        if target.kind == 'file' and self._root is not None:
            try:
                return await asyncio.to_thread(_copy, folder, self._root / tenant_id / target.name)
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                problem = 'leads through a file, or to a folder that has a folder where a file would go'
                raise InvalidField('target', problem) from error
        hub_id = f'{target.kind}://{target.name}'
        order = {'folder': str(folder), 'target': hub_id, 'token': token, 'is_private': is_private}
        told = await self._upload(json.dumps(order).encode())
        if told.get('failure') == 'refused':
            raise HubRefused(hub_id)
        if 'url' not in told:
            raise ServiceUnreachable('hub')
        return SentFolder(told['url'], told['commit'])

    async def _upload(self, order: bytes) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            '-m',
            'services.gateway.exports.hub_process',
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Its client may write what it sent.
            stderr=asyncio.subprocess.DEVNULL,
            env={**environment, **_SETTINGS},
        )
        try:
            async with asyncio.timeout(self._seconds):
                output, _ = await process.communicate(order)
            return json.loads(output)
        except (TimeoutError, ValueError):
            return {}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _copy(source: Path, target: Path) -> SentFolder:
    """Copy the files; each appears whole or not at all."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        staging = target / f'.{new_id("part")}'
        try:
            shutil.copyfile(file, staging)
            staging.replace(target / file.name)
        finally:
            staging.unlink(missing_ok=True)
    return SentFolder(target.resolve().as_uri())
