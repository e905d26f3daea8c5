"""The hubs on the network and the caches their own clients keep."""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from twinkle.hub import model_scope
from twinkle.hub.errors import DatasetNotFound, HubUnreachable, ModelNotFound
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
"""What a template needs of a model's repository."""

MODEL_FILES = (*TOKENIZER_FILES, '*.safetensors', '*.safetensors.index.json', 'vocab*', 'merges.txt', '*.model')
"""What a model needs of it: no pickles and no code."""

PLUGIN_FILES = ('*.py', '*.json', '*.yaml', '*.txt', '*.jinja')
"""What a plugin is made of."""


def hugging_face_snapshots(name: str, kind: Kind) -> Iterator[Path]:
    """Yield the snapshot of branch `main` in Hugging Face's cache, if there is one.

    One of a dataset whose download broke off is none: nobody could tell that rows are missing.
    """
    home = Path(os.environ.get('HF_HOME', '~/.cache/huggingface')).expanduser()
    root = Path(os.environ.get('HF_HUB_CACHE', home / 'hub')).expanduser()
    repository = root / f'{kind}--{name.replace("/", "--")}'
    branch = repository / 'refs' / 'main'
    is_broken_off = kind == 'datasets' and any((repository / 'blobs').glob('*.incomplete'))
    if branch.is_file() and not is_broken_off:
        yield repository / 'snapshots' / branch.read_text().strip()


def model_scope_folders(name: str, kind: Kind) -> Iterator[Path]:
    """Yield the folders in which ModelScope's clients, old and new, keep a repository."""
    root = Path(os.environ.get('MODELSCOPE_CACHE', '~/.cache/modelscope')).expanduser()
    yield root / 'hub' / kind / name
    yield root / kind / name


def download(hub_id: HubId, *, kind: Kind, patterns: tuple[str, ...] | None) -> Path:
    """Download a repository with its hub's own client, which shows progress, and return its folder.

    Args:
        patterns: files wanted. None: all.

    Raises:
        ModelNotFound: the hub has no such model.
        DatasetNotFound: the hub has no such dataset.
        HubUnreachable: the hub did not answer or its client is not installed.
    """
    if hub_id.source == 'ms':
        return _download_model_scope(hub_id, kind, patterns)
    return _download_hugging_face(hub_id, kind, patterns)


def _download_hugging_face(hub_id: HubId, kind: Kind, patterns: tuple[str, ...] | None) -> Path:
    client = _client('huggingface_hub', hub_id, kind)
    try:
        folder = client.snapshot_download(
            hub_id.name,
            repo_type=kind.removesuffix('s'),
            allow_patterns=list(patterns) if patterns else None,
        )
    except client.errors.RepositoryNotFoundError as error:
        missing = ModelNotFound if kind == 'models' else DatasetNotFound
        raise missing(f'Hugging Face has no {kind.removesuffix("s")} {hub_id.name} that you may read') from error
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreachable(hub_id, kind, f'Hugging Face did not give it ({type(error).__name__})') from error
    return Path(folder)


def _download_model_scope(hub_id: HubId, kind: Kind, patterns: tuple[str, ...] | None) -> Path:
    try:
        return model_scope.fetch(hub_id.name, repo_type=kind.removesuffix('s'), patterns=patterns)
    except model_scope.RepositoryMissing as error:
        missing = ModelNotFound if kind == 'models' else DatasetNotFound
        raise missing(f'ModelScope has no {kind.removesuffix("s")} {hub_id.name} that you may read') from error
    except ImportError as error:
        reason = f"its client is not installed (pip install '{model_scope.INSTALL}')"
        raise _unreachable(hub_id, kind, reason) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreachable(hub_id, kind, f'ModelScope did not give it ({type(error).__name__})') from error


def _client(library: str, hub_id: HubId, kind: Kind) -> Any:
    """Load a hub's client by name: a machine that never downloads needs neither."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise _unreachable(hub_id, kind, f'its client is not installed (pip install {library})') from error


def _unreachable(hub_id: HubId, kind: Kind, reason: str) -> HubUnreachable:
    return HubUnreachable(
        f'{hub_id} is neither in the mirror ({_mirror()}) nor in a cache, and the network is no help: {reason}. '
        f'Put a copy at $TWINKLE_HUB_DIR/{kind}/{hub_id.name}, or give the path of a local folder'
    )


def _mirror() -> str:
    return (
        f'TWINKLE_HUB_DIR={os.environ["TWINKLE_HUB_DIR"]}'
        if 'TWINKLE_HUB_DIR' in os.environ
        else 'TWINKLE_HUB_DIR is unset'
    )
