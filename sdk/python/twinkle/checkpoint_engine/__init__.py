"""Weights as bytes on their way: manifests, packing, chunks, digests and the peft folder.

A *state* is an adapter's tensors (and, if asked, what its trainer needs to resume) laid one
after the other in a single byte sequence that a `WeightManifest` describes. Nothing here loads
torch, opens a socket or knows a service; the checkpoint service, trainers and samplers build
on it.
"""

from twinkle.checkpoint_engine.assembler import Assembler, ChunkVerifier
from twinkle.checkpoint_engine.chunks import CHUNK_BYTES, StateChunk, chunk_checksum, iter_chunks
from twinkle.checkpoint_engine.errors import (
    AdapterMismatch,
    ChunkCorrupt,
    ChunkOutOfOrder,
    ChunkOutOfRange,
    DigestMismatch,
    InvalidManifest,
    InvalidModelFolder,
    InvalidPeftFolder,
    MergeRunning,
    StateError,
    StateIncomplete,
)
from twinkle.checkpoint_engine.lora_layers import is_named, scaling_at, value_at
from twinkle.checkpoint_engine.manifest import StateSection, TensorEntry, WeightManifest
from twinkle.checkpoint_engine.merge import MERGE_FILE, OUTPUT_DTYPES, MergeResult, export_merged
from twinkle.checkpoint_engine.packing import PackedState, pack_state, state_digest, unpack_state
from twinkle.checkpoint_engine.peft_config import adapter_config_json, parse_adapter_config
from twinkle.checkpoint_engine.peft_folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_MODEL_FILE,
    SEED_KEY,
    read_peft_folder,
    seed_metadata,
    write_peft_folder,
)
from twinkle.checkpoint_engine.peft_import import ImportedAdapter, import_adapter
from twinkle.checkpoint_engine.safetensors_file import FileEntry, build_header, parse_header

__all__ = [
    'ADAPTER_CONFIG_FILE',
    'ADAPTER_MODEL_FILE',
    'CHUNK_BYTES',
    'MERGE_FILE',
    'OUTPUT_DTYPES',
    'SEED_KEY',
    'AdapterMismatch',
    'Assembler',
    'ChunkCorrupt',
    'ChunkOutOfOrder',
    'ChunkOutOfRange',
    'ChunkVerifier',
    'DigestMismatch',
    'FileEntry',
    'ImportedAdapter',
    'InvalidManifest',
    'InvalidModelFolder',
    'InvalidPeftFolder',
    'MergeResult',
    'MergeRunning',
    'PackedState',
    'StateChunk',
    'StateError',
    'StateIncomplete',
    'StateSection',
    'TensorEntry',
    'WeightManifest',
    'adapter_config_json',
    'build_header',
    'chunk_checksum',
    'export_merged',
    'import_adapter',
    'is_named',
    'iter_chunks',
    'pack_state',
    'parse_adapter_config',
    'parse_header',
    'read_peft_folder',
    'scaling_at',
    'seed_metadata',
    'state_digest',
    'unpack_state',
    'value_at',
    'write_peft_folder',
]
