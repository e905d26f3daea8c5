"""Converts a model folder to one GGUF file, which llama.cpp and programs based on it load.

The library `gguf` knows the format, the names of tensors and the quantized types. Weights are converted one block of
rows at a time. The file appears under its name when it is complete.

Models whose results could differ are refused: other architectures, scaled rotary embeddings except those of Llama 3,
sliding windows, and tokenizers that `gguf_tokenizer` does not know.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import pi, prod
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import numpy.typing as npt

from twinkle.checkpoint_engine.errors import InvalidModelFolder
from twinkle.checkpoint_engine.float_bytes import FLOAT_DTYPES, to_float32
from twinkle.checkpoint_engine.gguf_tokenizer import GgufTokenizer
from twinkle.checkpoint_engine.hf_folder import CONFIG_FILE, ModelFolder
from twinkle.checkpoint_engine.merge import Progress
from twinkle.checkpoint_engine.safetensors_file import FileEntry

Array = npt.NDArray[np.float32]

GGUF_DTYPES: Mapping[str, gguf.GGMLQuantizationType] = {
    'float32': gguf.GGMLQuantizationType.F32,
    'float16': gguf.GGMLQuantizationType.F16,
    'bfloat16': gguf.GGMLQuantizationType.BF16,
    'q8_0': gguf.GGMLQuantizationType.Q8_0,
}
"""Types of matrices. Other tensors are always float32."""
_FILE_TYPES = {
    'float32': gguf.LlamaFileType.ALL_F32,
    'float16': gguf.LlamaFileType.MOSTLY_F16,
    'bfloat16': gguf.LlamaFileType.MOSTLY_BF16,
    'q8_0': gguf.LlamaFileType.MOSTLY_Q8_0,
}
_ARCHITECTURES = {
    'LlamaForCausalLM': gguf.MODEL_ARCH.LLAMA,
    'Qwen2ForCausalLM': gguf.MODEL_ARCH.QWEN2,
    'Qwen3ForCausalLM': gguf.MODEL_ARCH.QWEN3,
}
_REQUIRED_FIELDS = (
    'hidden_size',
    'intermediate_size',
    'max_position_embeddings',
    'num_attention_heads',
    'num_hidden_layers',
    'rms_norm_eps',
)
"""Fields of `config.json` without which llama.cpp cannot run the model."""
_EMBEDDING, _HEAD = 'model.embed_tokens.weight', 'lm_head.weight'
_ROTARY = ('.q_proj.weight', '.k_proj.weight')
"""Weights whose rows llama.cpp expects in another order, for the architecture Llama."""
_BLOCK_BYTES = 16 << 20
"""Maximum size of a block of rows in float32."""
_ROPE_FACTORS = 'rope_freqs.weight'
_ROPE_FIELDS = ('factor', 'high_freq_factor', 'low_freq_factor', 'original_max_position_embeddings')


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the file."""

    name: str
    entry: FileEntry
    path: Path
    """File with the tensor's values."""
    kind: gguf.GGMLQuantizationType
    head_rows: int
    """Number of rows of a head if the rows must be reordered; otherwise 0."""

    @property
    def size_bytes(self) -> int:
        """Size of the tensor in the file."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return prod(self.entry.shape) // block * block_bytes


class GgufModel:
    """A model folder that can be converted."""

    def __init__(self, folder: str | os.PathLike[str], *, dtype: str | None = None, name: str = '') -> None:
        """Read and check a model folder; weights are not read.

        Args:
            folder: the folder, in the layout of Hugging Face.
            dtype: type of the matrices, from `GGUF_DTYPES`. None: the type of the embedding.
            name: name of the model in the file. Empty: the name of the folder.

        Raises:
            ValueError: `dtype` is not supported.
            InvalidModelFolder: the model cannot be converted; the message names the reason.
        """
        self._model = ModelFolder.open(folder)
        self._config = self._model.config
        self._architecture = _architecture(self._config)
        embedding = self._model.entries.get(_EMBEDDING)
        if embedding is None:
            raise InvalidModelFolder(CONFIG_FILE, f'belongs to a model without {_EMBEDDING}')
        self._dtype = dtype or embedding.dtype
        if self._dtype not in GGUF_DTYPES:
            raise ValueError(f'dtype must be one of {", ".join(GGUF_DTYPES)}, got {self._dtype!r}')
        self._name = name or Path(folder).name
        self._tokenizer = GgufTokenizer(Path(folder), token_count=embedding.shape[0])
        self._factors = _rope_factors(self._config)
        self._tensors = self._plan()

    @property
    def size_bytes(self) -> int:
        """Approximate size of the file."""
        return sum(tensor.size_bytes for tensor in self._tensors)

    def write(self, target: Path, report: Progress) -> None:
        """Write the file, replacing an existing one.

        Args:
            target: the file.
            report: called with the numbers of written and of all bytes after every block. If it raises an error, the
                conversion ends, and the target is unchanged.

        Raises:
            OSError: reading or writing failed.
        """
        unfinished = target.with_name(f'.{target.name}.part')
        writer = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[self._architecture])
        try:
            self._add_fields(writer)
            factors = self._factors
            if factors is not None:
                writer.add_tensor_info(_ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
            for item in self._tensors:
                kind = np.dtype(np.float32)
                writer.add_tensor_info(item.name, item.entry.shape, kind, item.size_bytes, raw_dtype=item.kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            self._write_tensors(writer, factors, report)
            writer.close()
            unfinished.replace(target)
        finally:
            writer.close()
            unfinished.unlink(missing_ok=True)

    def _plan(self) -> list[_Tensor]:
        names = gguf.get_tensor_name_map(self._architecture, self._config['num_hidden_layers'])
        is_tied = self._config.get('tie_word_embeddings', False)
        tensors: list[_Tensor] = []
        for shard in self._model.shards:
            for entry in shard.entries:
                if (is_tied and entry.name == _HEAD) or entry.name.endswith('.rotary_emb.inv_freq'):
                    continue
                name = names.get_name(entry.name, try_suffixes=('.weight', '.bias'))
                if name is None or entry.dtype not in FLOAT_DTYPES:
                    raise InvalidModelFolder(shard.path.name, f'has a tensor without a place in GGUF: {entry.name}')
                tensors.append(_Tensor(name, entry, shard.path, self._kind_of(entry), self._head_rows(entry)))
        return tensors

    def _kind_of(self, entry: FileEntry) -> gguf.GGMLQuantizationType:
        kind = GGUF_DTYPES[self._dtype]
        if len(entry.shape) == 1:
            return gguf.GGMLQuantizationType.F32
        # Rows that are no multiple of the block cannot be quantized.
        is_whole = entry.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        return kind if is_whole else gguf.GGMLQuantizationType.F16

    def _head_rows(self, entry: FileEntry) -> int:
        is_reordered = self._architecture == gguf.MODEL_ARCH.LLAMA and entry.name.endswith(_ROTARY)
        return _head_dim(self._config) if is_reordered else 0

    def _add_fields(self, writer: gguf.GGUFWriter) -> None:
        config, head_dim = self._config, _head_dim(self._config)
        writer.add_name(self._name)
        writer.add_file_type(_FILE_TYPES[self._dtype])
        writer.add_vocab_size(self._model.entries[_EMBEDDING].shape[0])
        writer.add_context_length(config['max_position_embeddings'])
        writer.add_embedding_length(config['hidden_size'])
        writer.add_block_count(config['num_hidden_layers'])
        writer.add_feed_forward_length(config['intermediate_size'])
        writer.add_head_count(config['num_attention_heads'])
        writer.add_head_count_kv(config.get('num_key_value_heads') or config['num_attention_heads'])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(_rope(config)['rope_theta'])
        writer.add_layer_norm_rms_eps(config['rms_norm_eps'])
        self._tokenizer.add_to(writer)

    def _write_tensors(self, writer: gguf.GGUFWriter, factors: Array | None, report: Progress) -> None:
        if writer.fout is None:
            raise OSError('the file is not open')
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        if factors is not None:
            file.write(factors.tobytes())
            writer.write_padding(file, factors.nbytes)
        done, total = 0, self.size_bytes
        for tensor in self._tensors:
            for block in _blocks(tensor):
                file.write(block)
                done += len(block)
                report(done, total)
            writer.write_padding(file, tensor.size_bytes)
        file.flush()
        os.fsync(file.fileno())


def _architecture(config: Mapping[str, Any]) -> gguf.MODEL_ARCH:
    """Return the architecture of a model.

    Raises:
        InvalidModelFolder: the architecture, or one of its options, is not supported, or a field is missing.
    """
    names = config.get('architectures') or ['none']
    if names[0] not in _ARCHITECTURES:
        known = ', '.join(_ARCHITECTURES)
        raise InvalidModelFolder(CONFIG_FILE, f'names {names[0]}, which is not supported in GGUF; use {known}')
    rope_type = _rope(config)['rope_type']
    unsupported = {
        f'a rotary embedding of type {rope_type}': rope_type not in ('default', 'llama3'),
        'a partial rotary embedding': config.get('partial_rotary_factor', 1.0) != 1.0,
        'a sliding window': bool(config.get('use_sliding_window')),
        'biases of attention in Llama': names[0].startswith('Llama') and bool(config.get('attention_bias')),
        f'the activation {config.get("hidden_act")}': config.get('hidden_act', 'silu') != 'silu',
    }
    found = next((name for name, is_set in unsupported.items() if is_set), None)
    if found is not None:
        raise InvalidModelFolder(CONFIG_FILE, f'has {found}, which is not supported in GGUF')
    missing = [name for name in _REQUIRED_FIELDS if config.get(name) is None]
    if missing:
        raise InvalidModelFolder(CONFIG_FILE, f'lacks {", ".join(missing)}')
    return _ARCHITECTURES[names[0]]


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get('head_dim') or config['hidden_size'] // config['num_attention_heads']


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the rotary embedding, under the names of transformers 5 or of earlier versions."""
    options: dict[str, Any] = config.get('rope_parameters') or config.get('rope_scaling') or {}
    theta = options.get('rope_theta') or config.get('rope_theta') or 10000.0
    return {**options, 'rope_type': options.get('rope_type') or options.get('type') or 'default', 'rope_theta': theta}


def _rope_factors(config: Mapping[str, Any]) -> Array | None:
    """Return the factors by which Llama 3 divides the frequencies of the rotary embedding; None without scaling."""
    options, head_dim = _rope(config), _head_dim(config)
    if options['rope_type'] != 'llama3':
        return None
    missing = [name for name in _ROPE_FIELDS if name not in options]
    if missing:
        raise InvalidModelFolder(CONFIG_FILE, f'has a rope of type llama3 that lacks {", ".join(missing)}')
    low, high = options['low_freq_factor'], options['high_freq_factor']
    lengths = 2 * pi * options['rope_theta'] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = options['original_max_position_embeddings'] / lengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - smooth) / options['factor'] + smooth)).astype(np.float32)


def _blocks(tensor: _Tensor) -> Iterator[bytes]:
    """Yield the converted values of a tensor in blocks of rows."""
    entry = tensor.entry
    row_count = entry.shape[0]
    row_bytes = (entry.end - entry.begin) // row_count
    unit = tensor.head_rows or 1
    rows_at_once = max(1, _BLOCK_BYTES // (4 * prod(entry.shape[1:]) * unit)) * unit
    with tensor.path.open('rb') as file:
        file.seek(entry.begin)
        for begin in range(0, row_count, rows_at_once):
            count = min(rows_at_once, row_count - begin)
            values = to_float32(_read(file, count * row_bytes), entry.dtype)
            yield _converted(values.reshape(count, *entry.shape[1:]), tensor)


def _converted(rows: Array, tensor: _Tensor) -> bytes:
    if tensor.head_rows:
        halves = rows.reshape(-1, 2, tensor.head_rows // 2, rows.shape[1])
        rows = halves.swapaxes(1, 2).reshape(rows.shape)
    return gguf.quants.quantize(np.ascontiguousarray(rows), tensor.kind).tobytes()


def _read(file: IO[bytes], size_bytes: int) -> bytes:
    data = file.read(size_bytes)
    if len(data) != size_bytes:
        raise InvalidModelFolder(Path(file.name).name, 'was truncated while it was being read')
    return data
