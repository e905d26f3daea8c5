"""ModelScope's hub, spoken to with its own client (`modelscope-hub`), which is an extra.

The client keeps its own retries: it tries again for minutes where the hub is overloaded. `MODELSCOPE_ENDPOINT` or
`MODELSCOPE_DOMAIN` name another server that speaks the same, `MODELSCOPE_API_TOKEN` is for private repositories.
"""

import base64
import hashlib
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.hub.cache import build_once, cache_dir
from twinkle.hub.errors import HubUnreachable, UploadRefused
from twinkle.hub.ids import HubId

LIBRARY = 'modelscope_hub'
"""The client's module."""
INSTALL = 'twinkle-grpc[modelscope]'
"""What brings it."""

_INLINE_BYTES = 1 << 20
"""Larger files go by git-lfs whatever they are called."""
_REFUSED = frozenset({400, 401, 403, 404, 409, 422})
"""Answers of the hub that another try would get again."""


class RepositoryMissing(Exception):
    """ModelScope has no such repository that this machine may read."""


def fetch(name: str, *, repo_type: str, patterns: Sequence[str] | None) -> Path:
    """Return a folder with the files of a repository that match, downloading them once.

    Args:
        name: `org/name`.
        repo_type: 'model' or 'dataset'.
        patterns: files wanted. None: all.

    Raises:
        RepositoryMissing: there is no such repository.
        ImportError: the client is not installed.
        OSError, ValueError, RuntimeError: the hub did not give it.
    """
    client = _client()
    # Also of the name: 'a/b--c' and 'a--b/c' would be one folder.
    wanted = hashlib.sha256('\n'.join((name, *(patterns or ()))).encode()).hexdigest()[:12]
    # What is here is whole: a download that breaks off leaves nothing under this name.
    target = cache_dir() / 'modelscope' / f'{repo_type}s' / f'{name.replace("/", "--")}--{wanted}'

    def fill(folder: Path) -> None:
        api = client.HubApi(endpoint=_endpoint())
        api.download_repo(name, repo_type, local_dir=folder, allow_patterns=list(patterns) if patterns else None)

    try:
        return build_once(target, fill)
    except client.NotExistError as error:
        raise RepositoryMissing(name) from error
    except client.HubError as error:
        raise RuntimeError(str(error)) from error


def put(folder: Path, names: Sequence[str], target: HubId, *, token: str, is_private: bool) -> tuple[str, str]:
    """Put files of a folder into a model repository, which is made where there is none; return its URL and commit.

    Raises:
        UploadRefused: the hub does not take it from this token or under this name.
        HubUnreachable: the hub did not answer, or its client is not installed; try again later.
    """
    try:
        client = _client()
    except ImportError as error:
        raise HubUnreachable(
            f"uploading to {target} needs ModelScope's client, which is not installed: pip install '{INSTALL}'"
        ) from error
    api = client.HubApi(endpoint=_endpoint(), token=token)
    try:
        _make(client, api, target, is_private=is_private)
        commit = _commit(api, folder, names, target)
    except client.HubError as error:
        status = getattr(error, 'status_code', None)
        if status in _REFUSED:
            raise UploadRefused(
                f'{target} does not take the upload (HTTP {status}): check that the owner exists and that the token '
                'may write there'
            ) from error
        raise HubUnreachable(f'{target} failed with {type(error).__name__}; try again later') from error
    except (OSError, ValueError, RuntimeError) as error:
        raise HubUnreachable(f'{target} did not take the upload ({type(error).__name__}); try again later') from error
    return f'{api.legacy.endpoint}/models/{target.name}', commit


def _client() -> Any:
    """Load the client by name: a machine that never speaks to ModelScope does not need it."""
    return importlib.import_module(LIBRARY)


def _endpoint() -> str | None:
    return os.environ.get('MODELSCOPE_ENDPOINT') or os.environ.get('MODELSCOPE_DOMAIN') or None


def _make(client: Any, api: Any, target: HubId, *, is_private: bool) -> None:
    if not api.repo_exists(target.name, 'model'):
        visibility = 'private' if is_private else 'public'
        try:
            api.create_repo(target.name, 'model', visibility=visibility)
        except client.errors.AlreadyExistsError:
            # Somebody else made it meanwhile.
            return


def _commit(api: Any, folder: Path, names: Sequence[str], target: HubId) -> str:
    """Upload these files as one commit, all or none, and return its id; empty where the hub does not say it.

    The client's own `upload_folder` commits what it could send and leaves out the rest, so its single steps are used.
    """
    files = [_File.of(folder / name) for name in names]
    large = [{'oid': file.sha256, 'size': file.size_bytes} for file in files if file.is_large]
    places: dict[str, Any] = api.legacy.validate_blobs(target.name, 'model', large) if large else {}
    for file in files:
        # Two files of the same content are one object, which is sent once.
        place = places.pop(file.sha256, None) if file.is_large else None
        if place:
            with file.path.open('rb') as content:
                api.legacy.upload_blob(place, content, file.size_bytes)
    message = f'Upload {len(files)} files'
    said = api.legacy.create_commit(target.name, 'model', [file.action() for file in files], message)
    return next((str(said[key]) for key in ('oid', 'Oid', 'CommitId', 'Id') if said.get(key)), '')


@dataclass(frozen=True)
class _File:
    """A file on its way up."""

    path: Path
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> '_File':
        with path.open('rb') as content:
            return cls(path, path.stat().st_size, hashlib.file_digest(content, 'sha256').hexdigest())

    @property
    def is_large(self) -> bool:
        """Whether it goes by git-lfs; others are inside the commit."""
        return self.path.suffix == '.safetensors' or self.size_bytes > _INLINE_BYTES

    def action(self) -> dict[str, Any]:
        """Return what the commit says of it."""
        content = '' if self.is_large else base64.b64encode(self.path.read_bytes()).decode()
        return {
            'action': 'create',
            'path': self.path.name,
            'type': 'lfs' if self.is_large else 'normal',
            'size': self.size_bytes,
            'sha256': self.sha256 if self.is_large else '',
            'content': content,
            'encoding': '' if self.is_large else 'base64',
        }
