"""Access to ModelScope with its own client (`modelscope-hub`), an optional dependency.

The client retries automatically, for several minutes if the hub is overloaded. `MODELSCOPE_ENDPOINT` or
`MODELSCOPE_DOMAIN` selects another server with the same API. Private repositories need `MODELSCOPE_API_TOKEN`.
"""

import base64
import hashlib
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.hub.cache import build_once, cache_dir
from twinkle.hub.errors import HubUnreachable, UploadRefused
from twinkle.hub.ids import HubId

LIBRARY = 'modelscope_hub'
"""Module name of the client."""
INSTALL = 'twinkle-grpc[modelscope]'
"""Requirement that installs the client."""

_INLINE_BYTES = 1 << 20
"""Maximum size of a file inside a commit; larger files use git-lfs regardless of their names."""
_REFUSED = frozenset({400, 401, 403, 404, 409, 422})
"""HTTP status codes for which a retry does not help."""


class RepositoryMissing(Exception):
    """The repository does not exist on ModelScope or is not accessible."""


def fetch(
    name: str,
    *,
    repo_type: str,
    patterns: Sequence[str] | None,
    check: Callable[[list[int]], None],
    token: str | None = None,
) -> Path:
    """Return a folder with the matching files of a repository, which are downloaded once.

    Args:
        name: `org/name`.
        repo_type: 'model' or 'dataset'.
        patterns: patterns of the files to download; None downloads all files.
        check: called with the sizes of all files before a download, and may raise an error.
        token: access token; empty for none. Default: the token of this machine.

    Raises:
        RepositoryMissing: the repository does not exist or is not accessible.
        ImportError: the client is not installed.
        OSError, ValueError, RuntimeError: the download failed.
    """
    client = _client()
    # The digest includes the name, because 'a/b--c' and 'a--b/c' would otherwise share a folder. Folders that were
    # downloaded with a token may be private, and are not used without one.
    parts = (name, *(patterns or ()), *(['without a token'] if token == '' else ()))
    digest = hashlib.sha256('\n'.join(parts).encode()).hexdigest()[:12]
    # An existing folder is complete, because `build_once` removes the folder of a failed download.
    target = cache_dir() / 'modelscope' / f'{repo_type}s' / f'{name.replace("/", "--")}--{digest}'

    def fill(folder: Path) -> None:
        api = client.HubApi(endpoint=_endpoint(), token=token)
        check([file.size for file in api.list_repo_files(name, repo_type)])
        api.download_repo(name, repo_type, local_dir=folder, allow_patterns=list(patterns) if patterns else None)

    try:
        return build_once(target, fill)
    except client.NotExistError as error:
        raise RepositoryMissing(name) from error
    except client.HubError as error:
        raise RuntimeError(str(error)) from error


def put(folder: Path, names: Sequence[str], target: HubId, *, token: str, is_private: bool) -> tuple[str, str]:
    """Upload files of a folder to a model repository, which is created if it is missing.

    Args:
        folder: the folder with the files.
        names: names of the files to upload.
        target: the repository.
        token: access token with write permission.
        is_private: whether a repository that is created is private.

    Returns:
        The URL of the repository and the id of the commit; the id is empty if the hub does not return it.

    Raises:
        UploadRefused: the hub refuses the token or the name.
        HubUnreachable: the hub did not respond, or its client is not installed; retry later.
    """
    try:
        client = _client()
    except ImportError as error:
        raise HubUnreachable(
            f"uploading to {target} needs ModelScope's client, which is not installed; run: pip install '{INSTALL}'"
        ) from error
    api = client.HubApi(endpoint=_endpoint(), token=token)
    try:
        _create_repository(client, api, target, is_private=is_private)
        commit = _commit(api, folder, names, target)
    except client.HubError as error:
        status = getattr(error, 'status_code', None)
        if status in _REFUSED:
            raise UploadRefused(
                f'{target} refused the upload (HTTP {status}): check that the owner exists and that the token has '
                'write permission'
            ) from error
        raise HubUnreachable(f'uploading to {target} failed with {type(error).__name__}; retry later') from error
    except (OSError, ValueError, RuntimeError) as error:
        raise HubUnreachable(f'uploading to {target} failed ({type(error).__name__}); retry later') from error
    return f'{api.legacy.endpoint}/models/{target.name}', commit


def _client() -> Any:
    """Return the client's module. It is imported only here, because it is an optional dependency."""
    return importlib.import_module(LIBRARY)


def _endpoint() -> str | None:
    return os.environ.get('MODELSCOPE_ENDPOINT') or os.environ.get('MODELSCOPE_DOMAIN') or None


def _create_repository(client: Any, api: Any, target: HubId, *, is_private: bool) -> None:
    if not api.repo_exists(target.name, 'model'):
        visibility = 'private' if is_private else 'public'
        try:
            api.create_repo(target.name, 'model', visibility=visibility)
        except client.errors.AlreadyExistsError:
            # Another process created the repository after the check.
            return


def _commit(api: Any, folder: Path, names: Sequence[str], target: HubId) -> str:
    """Upload the files as one atomic commit and return its id, which is empty if the hub does not return it.

    The client's `upload_folder` commits even if it could not send all files, so its individual steps are used instead.
    """
    files = [_File.of(folder / name) for name in names]
    large = [{'oid': file.sha256, 'size': file.size_bytes} for file in files if file.is_large]
    upload_urls: dict[str, Any] = api.legacy.validate_blobs(target.name, 'model', large) if large else {}
    for file in files:
        # Files with the same content are one object, which is sent once.
        upload_url = upload_urls.pop(file.sha256, None) if file.is_large else None
        if upload_url:
            with file.path.open('rb') as content:
                api.legacy.upload_blob(upload_url, content, file.size_bytes)
    message = f'Upload {len(files)} files'
    response = api.legacy.create_commit(target.name, 'model', [file.action() for file in files], message)
    return next((str(response[key]) for key in ('oid', 'Oid', 'CommitId', 'Id') if response.get(key)), '')


@dataclass(frozen=True)
class _File:
    """A file to upload."""

    path: Path
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> '_File':
        with path.open('rb') as content:
            return cls(path, path.stat().st_size, hashlib.file_digest(content, 'sha256').hexdigest())

    @property
    def is_large(self) -> bool:
        """Whether the file uses git-lfs; other files are part of the commit request."""
        return self.path.suffix == '.safetensors' or self.size_bytes > _INLINE_BYTES

    def action(self) -> dict[str, Any]:
        """Return the file's entry in the commit request."""
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
