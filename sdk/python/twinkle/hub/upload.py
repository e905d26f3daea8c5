"""Upload a local folder to a repository on a hub.

Only a model's files are uploaded: weights in safetensors, configuration, tokenizer and text files. Each hub is accessed
with its own client.
"""

import importlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from twinkle.hub import model_scope
from twinkle.hub.card import CARD_FILE, is_generated
from twinkle.hub.errors import HubError, HubUnreachable, UploadRefused
from twinkle.hub.ids import HubId

_TOKEN_VARIABLES = {'hf': 'HF_TOKEN', 'ms': 'MODELSCOPE_API_TOKEN'}

UPLOAD_FILES = ('*.safetensors', '*.json', '*.txt', '*.model', '*.jinja', '*.md', 'LICENSE*')
"""Patterns of the files that are uploaded; they exclude pickles and code."""
_REFUSED = frozenset({400, 401, 403, 404, 409, 422})
"""HTTP status codes for which a retry does not help."""


@dataclass(frozen=True)
class Uploaded:
    """The result of an upload."""

    url: str
    """URL of the repository."""
    commit: str
    """Id of the commit with the files; empty if ModelScope did not return it."""


def token_variable(hub_id: str) -> str:
    """Return the name of the environment variable for the token of an id's hub.

    The hubs use different variables, so that a token is never sent to the wrong hub.

    Raises:
        HubError: the id is malformed or has no hub prefix.
    """
    source = HubId.parse(hub_id).source
    if source is None:
        raise HubError(f'{hub_id!r} is not a repository to upload to; use hf://org/name or ms://org/name')
    return _TOKEN_VARIABLES[source]


def upload(
    folder: str | os.PathLike[str],
    hub_id: str,
    *,
    token: str,
    is_private: bool = True,
    ignore: tuple[str, ...] = (),
) -> Uploaded:
    """Upload the files of a folder, without its subfolders, to a model repository as one commit.

    A missing repository is created. Files with the same name are replaced, and other files are kept. On Hugging Face, a
    generated `README.md` does not replace one that was written or edited by hand.

    Args:
        folder: the folder to upload; it is not changed.
        hub_id: `hf://org/name` or `ms://org/name`. `HF_ENDPOINT` and `MODELSCOPE_ENDPOINT` select other servers with
            the same API.
        token: access token with write permission. It is neither stored nor logged.
        is_private: whether a repository that is created is private. Default: True.
        ignore: patterns of file names to leave out. Default: none.

    Raises:
        HubError: the id is malformed or has no hub prefix, the token is empty, or the folder has no files to upload.
        UploadRefused: the hub refuses the token or the name, or the token is not printable ASCII; a retry does not
            help.
        HubUnreachable: the hub did not respond, or its client is not installed; retry later.

    Idempotency: uploading the same files again leaves the content of the repository unchanged.
    """
    request = _upload_request(folder, hub_id, token, ignore)
    return _execute(request, token=token, is_private=is_private)


def upload_later(
    folder: str | os.PathLike[str],
    hub_id: str,
    *,
    token: str,
    is_private: bool = True,
    ignore: tuple[str, ...] = (),
) -> Future[Uploaded]:
    """Start an `upload` in a background thread and return its future. The program waits for the upload at its exit.

    The folder must not change until the future is done. The arguments are checked immediately.

    Args:
        folder: as in `upload`.
        hub_id: as in `upload`.
        token: as in `upload`.
        is_private: as in `upload`.
        ignore: as in `upload`.

    Raises:
        HubError: an argument is invalid, as in `upload`. Errors of the hub are raised by the future.
    """
    request = _upload_request(folder, hub_id, token, ignore)
    thread = ThreadPoolExecutor(1, 'hub-upload')
    try:
        return thread.submit(_execute, request, token=token, is_private=is_private)
    finally:
        thread.shutdown(wait=False)


@dataclass(frozen=True)
class _UploadRequest:
    """A validated upload."""

    folder: Path
    target: HubId
    names: list[str]
    """Names of the files to upload, sorted."""


def _upload_request(folder: str | os.PathLike[str], hub_id: str, token: str, ignore: tuple[str, ...]) -> _UploadRequest:
    target = HubId.parse(hub_id)
    if target.source is None or '/' not in target.name:
        raise HubError(f'{hub_id!r} is not a repository to upload to; use hf://org/name or ms://org/name')
    if not token:
        raise HubError(f'the token is empty; uploading to {hub_id} needs a token with write permission')
    if not (token.isascii() and token.isprintable()):
        raise UploadRefused(f'{hub_id}: the token is invalid: it must consist of printable ASCII characters')
    return _UploadRequest(Path(folder), target, _names(Path(folder), ignore))


def _names(folder: Path, ignore: tuple[str, ...]) -> list[str]:
    """Return the names of the files to upload; symbolic links are excluded, because they may leave the folder."""
    if not folder.is_dir():
        raise HubError(f'the folder {folder} does not exist')
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    chosen = [name for name in names if _is_any(name, UPLOAD_FILES) and not _is_any(name, ignore)]
    if not chosen:
        raise HubError(f'{folder} has no files to upload; supported are {", ".join(UPLOAD_FILES)}')
    return chosen


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _execute(request: _UploadRequest, *, token: str, is_private: bool) -> Uploaded:
    if request.target.source == 'hf':
        return _upload_hugging_face(request, token=token, is_private=is_private)
    return Uploaded(*model_scope.put(request.folder, request.names, request.target, token=token, is_private=is_private))


def _upload_hugging_face(request: _UploadRequest, *, token: str, is_private: bool) -> Uploaded:
    target, names = request.target, request.names
    try:
        client: Any = importlib.import_module('huggingface_hub')
    except ImportError as error:
        raise HubUnreachable(
            f"uploading to {target} needs the hub's client, which is not installed (pip install huggingface_hub)"
        ) from error
    api = client.HfApi(endpoint=os.environ.get('HF_ENDPOINT') or None, token=token)
    try:
        repository = api.create_repo(target.name, private=is_private, exist_ok=True)
        if _has_generated_card(request) and _is_card_edited(client, api, target.name):
            names = [name for name in names if name != CARD_FILE]
        paths = [(name, str(request.folder / name)) for name in names]
        files = [client.CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in paths]
        commit = api.create_commit(target.name, files, commit_message=f'Upload {len(names)} files')
    except client.errors.HfHubHTTPError as error:
        if error.response.status_code in _REFUSED:
            raise UploadRefused(
                f'{target} refused the upload (HTTP {error.response.status_code}): check that the owner exists and '
                'that the token has write permission'
            ) from error
        status = error.response.status_code
        raise HubUnreachable(f'uploading to {target} failed with HTTP {status}; retry later') from error
    except client.errors.HFValidationError as error:
        raise UploadRefused(f'{target} refused the upload: the name is not valid for a repository') from error
    # The client does not wrap the errors of its HTTP library.
    except (client.errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise HubUnreachable(f'uploading to {target} failed ({type(error).__name__}); retry later') from error
    return Uploaded(str(repository), commit.oid)


def _has_generated_card(request: _UploadRequest) -> bool:
    return CARD_FILE in request.names and is_generated((request.folder / CARD_FILE).read_bytes())


def _is_card_edited(client: Any, api: Any, repository: str) -> bool:
    """Return whether a repository has a card that was written or edited by hand."""
    with TemporaryDirectory() as folder:
        try:
            path = api.hf_hub_download(repository, CARD_FILE, local_dir=folder)
        except client.errors.RemoteEntryNotFoundError:
            return False
        return not is_generated(Path(path).read_bytes())
