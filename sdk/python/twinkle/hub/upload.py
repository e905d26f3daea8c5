"""A folder of this machine to a repository on a hub.

Only what a model's folder is made of goes up: weights in safetensors, configuration, tokenizer, texts. Each hub is
spoken to with its own client.
"""

import importlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from twinkle.hub import model_scope
from twinkle.hub.errors import HubError, HubUnreachable, UploadRefused
from twinkle.hub.ids import HubId

_TOKEN_VARIABLES = {'hf': 'HF_TOKEN', 'ms': 'MODELSCOPE_API_TOKEN'}

UPLOAD_FILES = ('*.safetensors', '*.json', '*.txt', '*.model', '*.jinja', '*.md', 'LICENSE*')
"""What is uploaded: no pickles and no code."""
_REFUSED = frozenset({400, 401, 403, 404, 409, 422})
"""Answers of the hub that another try would get again."""


@dataclass(frozen=True)
class Uploaded:
    """Where a folder went."""

    url: str
    """Of the repository."""
    commit: str
    """Digest of the commit that holds the files; empty where ModelScope did not say it."""


def token_variable(hub_id: str) -> str:
    """Return the variable in which the hub of an id has its users keep their token, so that none gets another's.

    Raises:
        HubError: the id is malformed or names no hub.
    """
    source = HubId.parse(hub_id).source
    if source is None:
        raise HubError(f'{hub_id!r} names no repository to upload to; write hf://org/name or ms://org/name')
    return _TOKEN_VARIABLES[source]


def upload(
    folder: str | os.PathLike[str],
    hub_id: str,
    *,
    token: str,
    is_private: bool = True,
    ignore: tuple[str, ...] = (),
) -> Uploaded:
    """Put the files of a folder, not of its subfolders, into a repository as one commit.

    The repository is made where there is none; files of the same name are replaced, others stay.

    Args:
        folder: What to upload; only read.
        hub_id: `hf://org/name` or `ms://org/name`. `HF_ENDPOINT` and `MODELSCOPE_ENDPOINT` name other servers that
            speak the same.
        token: Of someone who may write there. It is neither kept nor logged.
        is_private: Whether a repository that is made can be seen by its owner only.
        ignore: Patterns of files to leave out.

    Raises:
        HubError: the id is malformed or names no hub, or the folder has nothing to upload.
        UploadRefused: the hub does not take it from this token or under this name, whenever it is asked.
        HubUnreachable: the hub did not answer, or its client is not installed; try again later.

    Idempotency: the same files again leave the repository as it is.
    """
    order = _order(folder, hub_id, token, ignore)
    return _carry_out(order, token=token, is_private=is_private)


def upload_later(
    folder: str | os.PathLike[str],
    hub_id: str,
    *,
    token: str,
    is_private: bool = True,
    ignore: tuple[str, ...] = (),
) -> Future[Uploaded]:
    """Begin an `upload` in a thread of its own, and return its result to come; a program that ends waits for it.

    The folder must stay as it is until then. What can be told without the hub is refused at once.

    Args:
        folder: As of `upload`.
        hub_id: As of `upload`.
        token: As of `upload`.
        is_private: As of `upload`.
        ignore: As of `upload`.

    Raises:
        HubError: as `upload`, but for `HubUnreachable` and what the hub itself refuses: the result raises those.
    """
    order = _order(folder, hub_id, token, ignore)
    thread = ThreadPoolExecutor(1, 'hub-upload')
    try:
        return thread.submit(_carry_out, order, token=token, is_private=is_private)
    finally:
        thread.shutdown(wait=False)


@dataclass(frozen=True)
class _Order:
    """What goes where."""

    folder: Path
    target: HubId
    names: list[str]
    """Of the files."""


def _order(folder: str | os.PathLike[str], hub_id: str, token: str, ignore: tuple[str, ...]) -> _Order:
    target = HubId.parse(hub_id)
    if target.source is None or '/' not in target.name:
        raise HubError(f'{hub_id!r} names no repository to upload to; write hf://org/name or ms://org/name')
    if not token:
        raise HubError(f'uploading to {hub_id} needs a token that may write there')
    if not (token.isascii() and token.isprintable()):
        raise UploadRefused(f'{hub_id}: no hub gave out this token: a token is of printable ASCII characters')
    return _Order(Path(folder), target, _names(Path(folder), ignore))


def _names(folder: Path, ignore: tuple[str, ...]) -> list[str]:
    """Return the files to upload. A link could lead out of the folder, so none is followed."""
    if not folder.is_dir():
        raise HubError(f'there is no folder {folder}')
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    chosen = [name for name in names if _is_any(name, UPLOAD_FILES) and not _is_any(name, ignore)]
    if not chosen:
        raise HubError(f'{folder} holds nothing to upload; there would have to be {", ".join(UPLOAD_FILES)}')
    return chosen


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _carry_out(order: _Order, *, token: str, is_private: bool) -> Uploaded:
    if order.target.source == 'hf':
        return _upload_hugging_face(order, token=token, is_private=is_private)
    return Uploaded(*model_scope.put(order.folder, order.names, order.target, token=token, is_private=is_private))


def _upload_hugging_face(order: _Order, *, token: str, is_private: bool) -> Uploaded:
    target, names = order.target, order.names
    try:
        client: Any = importlib.import_module('huggingface_hub')
    except ImportError as error:
        raise HubUnreachable(
            f'uploading to {target} needs its client, which is not installed (pip install huggingface_hub)'
        ) from error
    api = client.HfApi(endpoint=os.environ.get('HF_ENDPOINT') or None, token=token)
    files = [client.CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(order.folder / name)) for name in names]
    try:
        repository = api.create_repo(target.name, private=is_private, exist_ok=True)
        commit = api.create_commit(target.name, files, commit_message=f'Upload {len(names)} files')
    except client.errors.HfHubHTTPError as error:
        if error.response.status_code in _REFUSED:
            raise UploadRefused(
                f'{target} does not take the upload (HTTP {error.response.status_code}): check that the owner exists '
                'and that the token may write there'
            ) from error
        raise HubUnreachable(f'{target} failed with HTTP {error.response.status_code}; try again later') from error
    except client.errors.HFValidationError as error:
        raise UploadRefused(f'{target} does not take the upload: no repository can have that name') from error
    # The client lets the errors of what it sends with through.
    except (client.errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise HubUnreachable(f'{target} did not take the upload ({type(error).__name__}); try again later') from error
    return Uploaded(str(repository), commit.oid)
