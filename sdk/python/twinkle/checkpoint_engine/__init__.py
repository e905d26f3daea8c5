"""Weight transfer formats: manifests, packing, chunks, digests, deltas and PEFT folders.

A *state* is a single byte sequence that contains the weights of an adapter or a model and, optionally, the data that
its trainer needs to resume. A `WeightManifest` describes a state. The checkpoint service, trainers and samplers use
this package, which does not depend on services. Only transports, which `load_transport` returns, use torch and open
connections.
"""

from twinkle.checkpoint_engine.assembler import Assembler, ChunkVerifier
from twinkle.checkpoint_engine.base_source import BaseSource
from twinkle.checkpoint_engine.chunks import CHUNK_BYTES, StateChunk, chunk_checksum, iter_chunks
from twinkle.checkpoint_engine.delta import apply_delta, encode_delta, is_delta_possible
from twinkle.checkpoint_engine.engine import CheckpointEngine, HostMemoryEngine, WeightReceiver
from twinkle.checkpoint_engine.errors import (
    AdapterMismatch,
    ChunkCorrupt,
    ChunkOutOfOrder,
    ChunkOutOfRange,
    DigestMismatch,
    InvalidDelta,
    InvalidManifest,
    InvalidModelFolder,
    InvalidPeftFolder,
    MergeRunning,
    StateError,
    StateIncomplete,
    TransferFailed,
    TransportUnavailable,
    WeightsOutOfRange,
)
from twinkle.checkpoint_engine.lora_layers import is_named, scaling_at, value_at
from twinkle.checkpoint_engine.manager import CheckpointEngineManager, SyncedWeights
from twinkle.checkpoint_engine.manifest import Layout, StateSection, TensorEntry, WeightManifest
from twinkle.checkpoint_engine.merge import MERGE_FILE, OUTPUT_DTYPES, MergeResult, export_merged
from twinkle.checkpoint_engine.model_card import adapter_card
from twinkle.checkpoint_engine.packing import PackedState, StatePlan, pack_state, plan_state, state_digest, unpack_state
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
from twinkle.checkpoint_engine.rounding import ROUNDED_DTYPES, RoundedTensors, round_tensors
from twinkle.checkpoint_engine.safetensors_file import FileEntry, build_header, parse_header
from twinkle.checkpoint_engine.state_files import (
    MODEL_FILE,
    WEIGHTS_FILES,
    description_files,
    shared_files,
    weights_file,
    weights_header,
)
from twinkle.checkpoint_engine.transport import (
    TRANSPORTS,
    Rendezvous,
    TransportOptions,
    WeightTransport,
    load_transport,
)

__all__ = [
    'ADAPTER_CONFIG_FILE',
    'ADAPTER_MODEL_FILE',
    'CHUNK_BYTES',
    'MERGE_FILE',
    'MODEL_FILE',
    'OUTPUT_DTYPES',
    'ROUNDED_DTYPES',
    'SEED_KEY',
    'TRANSPORTS',
    'WEIGHTS_FILES',
    'AdapterMismatch',
    'Assembler',
    'BaseSource',
    'CheckpointEngine',
    'CheckpointEngineManager',
    'ChunkCorrupt',
    'ChunkOutOfOrder',
    'ChunkOutOfRange',
    'ChunkVerifier',
    'DigestMismatch',
    'FileEntry',
    'HostMemoryEngine',
    'ImportedAdapter',
    'InvalidDelta',
    'InvalidManifest',
    'InvalidModelFolder',
    'InvalidPeftFolder',
    'Layout',
    'MergeResult',
    'MergeRunning',
    'PackedState',
    'Rendezvous',
    'RoundedTensors',
    'StateChunk',
    'StateError',
    'StateIncomplete',
    'StatePlan',
    'StateSection',
    'SyncedWeights',
    'TensorEntry',
    'TransferFailed',
    'TransportOptions',
    'TransportUnavailable',
    'WeightManifest',
    'WeightReceiver',
    'WeightTransport',
    'WeightsOutOfRange',
    'adapter_card',
    'adapter_config_json',
    'apply_delta',
    'build_header',
    'chunk_checksum',
    'description_files',
    'encode_delta',
    'export_merged',
    'import_adapter',
    'is_delta_possible',
    'is_named',
    'iter_chunks',
    'load_transport',
    'pack_state',
    'parse_adapter_config',
    'parse_header',
    'plan_state',
    'read_peft_folder',
    'round_tensors',
    'scaling_at',
    'seed_metadata',
    'shared_files',
    'state_digest',
    'unpack_state',
    'value_at',
    'weights_file',
    'weights_header',
    'write_peft_folder',
]
