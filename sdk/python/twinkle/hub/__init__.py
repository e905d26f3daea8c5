"""Resolve ids of models and datasets to local folders, and upload folders to hubs.

An id is looked up in this order: aliases and built-in models (for models only), local paths, the mirror in
`TWINKLE_HUB_DIR`, the caches, the network. This package does not import torch.
"""

from twinkle.hub.cache import cache_dir
from twinkle.hub.card import CARD_FILE, is_generated, signed_card
from twinkle.hub.errors import (
    DatasetNotFound,
    DigestMismatch,
    DownloadTooLarge,
    HubError,
    HubUnreachable,
    ModelNotFound,
    PluginNotFound,
    RepositoryMoved,
    UploadRefused,
)
from twinkle.hub.ids import HubId, local_path, public_name, repository_name, without_alias
from twinkle.hub.operation import HFHub, HubOperation, MSHub
from twinkle.hub.remote import PLUGIN_FILES
from twinkle.hub.resolve import (
    BUILT_IN_MODELS,
    find_dataset,
    get_model,
    resolve_dataset,
    resolve_model,
    resolve_plugin,
    resolve_tokenizer,
    weight_bytes,
)
from twinkle.hub.upload import UPLOAD_FILES, Uploaded, token_variable, upload, upload_later

__all__ = [
    'BUILT_IN_MODELS',
    'CARD_FILE',
    'PLUGIN_FILES',
    'UPLOAD_FILES',
    'DatasetNotFound',
    'DigestMismatch',
    'DownloadTooLarge',
    'HFHub',
    'HubError',
    'HubId',
    'HubOperation',
    'HubUnreachable',
    'MSHub',
    'ModelNotFound',
    'PluginNotFound',
    'RepositoryMoved',
    'UploadRefused',
    'Uploaded',
    'cache_dir',
    'find_dataset',
    'get_model',
    'is_generated',
    'local_path',
    'public_name',
    'repository_name',
    'resolve_dataset',
    'resolve_model',
    'resolve_plugin',
    'resolve_tokenizer',
    'signed_card',
    'token_variable',
    'upload',
    'upload_later',
    'weight_bytes',
    'without_alias',
]
