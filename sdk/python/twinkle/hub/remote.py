"""Downloads from the hubs, and the caches of their clients."""

import importlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from twinkle.hub import model_scope
from twinkle.hub.errors import DatasetNotFound, DownloadTooLarge, HubUnreachable, ModelNotFound, RepositoryMoved
from twinkle.hub.ids import HubId

Kind = Literal['models', 'datasets']

TOKENIZER_FILES = (
    'tokenizer*',
    '*.jinja',
    'config.json',
    'generation_config.json',
    'preprocessor_config.json',
    'special_tokens_map.json',
)
"""Patterns of the files in a model repository that a template needs."""

MODEL_FILES = (*TOKENIZER_FILES, '*.safetensors', '*.safetensors.index.json', 'vocab*', 'merges.txt', '*.model')
"""Patterns of the files in a model repository that a model needs, without pickles and code."""

PLUGIN_FILES = ('*.py', '*.json', '*.yaml', '*.txt', '*.jinja')
"""Patterns of the files of a plugin."""


def hugging_face_snapshots(name: str, kind: Kind) -> Iterator[Path]:
    """Yield the snapshot of branch `main` in the Hugging Face cache, if it exists.

    An incomplete download of a dataset is skipped, because missing rows could not be detected later.
    """
    home = Path(os.environ.get('HF_HOME', '~/.cache/huggingface')).expanduser()
    root = Path(os.environ.get('HF_HUB_CACHE', home / 'hub')).expanduser()
    repository = root / f'{kind}--{name.replace("/", "--")}'
    branch = repository / 'refs' / 'main'
    is_incomplete = kind == 'datasets' and any((repository / 'blobs').glob('*.incomplete'))
    if branch.is_file() and not is_incomplete:
        yield repository / 'snapshots' / branch.read_text().strip()


def model_scope_folders(name: str, kind: Kind) -> Iterator[Path]:
    """Yield the cache folders that old and new ModelScope clients use for a repository."""
    root = Path(os.environ.get('MODELSCOPE_CACHE', '~/.cache/modelscope')).expanduser()
    yield root / 'hub' / kind / name
    yield root / kind / name


def download(
    hub_id: HubId,
    *,
    kind: Kind,
    patterns: tuple[str, ...] | None,
    limit_bytes: int | None = None,
    is_token_used: bool = True,
    is_move_allowed: bool = True,
) -> Path:
    """Download a repository with its hub's own client, which shows progress, and return its folder.

    Args:
        hub_id: the repository; a bare id means Hugging Face.
        kind: 'models' or 'datasets'.
        patterns: patterns of the files to download; None downloads all files.
        limit_bytes: maximum total size of the files of the repository. Default: no limit.
        is_token_used: whether the token of this machine is sent. Default: True.
        is_move_allowed: whether the token may be used for a repository on Hugging Face that has another name now. If
            not, such a repository must be public. Default: True.

    Raises:
        DownloadTooLarge: the files are larger than the limit.
        RepositoryMoved: the repository is not public and has another name now, which is not allowed.
        ModelNotFound: the model does not exist on the hub or is not accessible.
        DatasetNotFound: the dataset does not exist on the hub or is not accessible.
        HubUnreachable: the hub did not respond, or its client is not installed.
    """
    if hub_id.source == 'ms':
        return _download_model_scope(hub_id, kind, patterns, limit_bytes, is_token_used=is_token_used)
    fetch = partial(_download_hugging_face, hub_id, kind=kind, patterns=patterns, limit_bytes=limit_bytes)
    try:
        return fetch(is_token_used=is_token_used, is_move_allowed=is_move_allowed or not is_token_used)
    except RepositoryMoved as moved:
        try:
            return fetch(is_token_used=False, is_move_allowed=True)
        except (ModelNotFound, DatasetNotFound):
            raise moved from None


def _download_hugging_face(
    hub_id: HubId,
    *,
    kind: Kind,
    patterns: tuple[str, ...] | None,
    limit_bytes: int | None,
    is_token_used: bool,
    is_move_allowed: bool,
) -> Path:
    client = _client('huggingface_hub', hub_id, kind)
    token = None if is_token_used else False
    missing = ModelNotFound if kind == 'models' else DatasetNotFound
    try:
        revision = None
        # Without a token, the repository must be public now: the client would also return a copy in its cache.
        if limit_bytes is not None or not (is_token_used and is_move_allowed):
            api = client.HfApi(endpoint=os.environ.get('HF_ENDPOINT') or None, token=token)
            info = api.repo_info(hub_id.name, repo_type=kind.removesuffix('s'), files_metadata=True)
            if not is_move_allowed:
                hub_id.refuse_moved(info.id)
            if info.gated and not is_token_used:
                raise missing(_absent('Hugging Face', hub_id, kind))
            if limit_bytes is not None:
                _check_size(hub_id, [file.size or 0 for file in info.siblings or ()], limit_bytes)
            revision = info.sha  # the files and the name may change after they were checked
        folder = client.snapshot_download(
            hub_id.name,
            repo_type=kind.removesuffix('s'),
            revision=revision,
            allow_patterns=list(patterns) if patterns else None,
            token=token,
        )
    except client.errors.RepositoryNotFoundError as error:
        raise missing(_absent('Hugging Face', hub_id, kind)) from error
    # The client does not wrap the errors of its HTTP library: httpx, or httpx2 since release 2 of the client.
    except (client.errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        reason = f'downloading from Hugging Face failed ({type(error).__name__})'
        raise _unreachable(hub_id, kind, reason) from error
    return Path(folder)


def _absent(hub: str, hub_id: HubId, kind: Kind) -> str:
    cure = 'check the name, or log in if it is private or gated'
    return f'{hub} has no {kind.removesuffix("s")} {hub_id.name} that you can access; {cure}'


def _download_model_scope(
    hub_id: HubId, kind: Kind, patterns: tuple[str, ...] | None, limit_bytes: int | None, *, is_token_used: bool
) -> Path:
    def check(sizes: list[int]) -> None:
        if limit_bytes is not None:
            _check_size(hub_id, sizes, limit_bytes)

    try:
        token = None if is_token_used else ''
        kind_name = kind.removesuffix('s')
        return model_scope.fetch(hub_id.name, repo_type=kind_name, patterns=patterns, check=check, token=token)
    except model_scope.RepositoryMissing as error:
        missing = ModelNotFound if kind == 'models' else DatasetNotFound
        raise missing(_absent('ModelScope', hub_id, kind)) from error
    except ImportError as error:
        reason = f"its client is not installed (pip install '{model_scope.INSTALL}')"
        raise _unreachable(hub_id, kind, reason) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = f'downloading from ModelScope failed ({type(error).__name__})'
        raise _unreachable(hub_id, kind, reason) from error


def _check_size(hub_id: HubId, sizes: list[int], limit_bytes: int) -> None:
    if sum(sizes) > limit_bytes:
        raise DownloadTooLarge(str(hub_id), sum(sizes), limit_bytes)


def _client(library: str, hub_id: HubId, kind: Kind) -> Any:
    """Return the module of a hub's client. It is imported only here, because only downloads need it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise _unreachable(hub_id, kind, f'its client is not installed (pip install {library})') from error


def _unreachable(hub_id: HubId, kind: Kind, reason: str) -> HubUnreachable:
    return HubUnreachable(
        f'{hub_id} is neither in the mirror ({_mirror()}) nor in a cache, and {reason}. '
        f'Put a copy at $TWINKLE_HUB_DIR/{kind}/{hub_id.name}, or use the path of a local folder'
    )


def _mirror() -> str:
    return (
        f'TWINKLE_HUB_DIR={os.environ["TWINKLE_HUB_DIR"]}'
        if 'TWINKLE_HUB_DIR' in os.environ
        else 'TWINKLE_HUB_DIR is unset'
    )
