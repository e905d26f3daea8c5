"""Tensors to one byte sequence and back.

Packing copies each tensor once; unpacking copies nothing. The order is fixed by the tensors
alone, so equal tensors give equal bytes and an equal digest, whatever order they came in.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from blake3 import blake3

from twinkle.checkpoint_engine.errors import StateIncomplete
from twinkle.checkpoint_engine.manifest import DTYPE_BYTES, StateSection, TensorEntry, WeightManifest
from twinkle.data_format import LoraConfig, TensorData


@dataclass(frozen=True)
class PackedState:
    """A state: its description and its bytes."""

    manifest: WeightManifest
    """Describes `data`."""
    data: memoryview
    """`manifest.size_bytes` read-only bytes."""


def state_digest(data: bytes | bytearray | memoryview) -> str:
    """Return blake3 of `data` as 64 lower-case hexadecimal digits."""
    return blake3(data).hexdigest()


def pack_state(
    adapter: Mapping[str, TensorData],
    *,
    base_model: str,
    lora_config: LoraConfig,
    trainer: Mapping[str, TensorData] | None = None,
) -> PackedState:
    """Lay tensors one after the other and describe the result.

    Within a section the tensors lie by falling element size, then by name: this is the order
    of the safetensors library, and keeps every tensor aligned to its element.

    Args:
        adapter: The adapter's weights by peft's names; at least one. Only read.
        base_model: Hub id of the base model.
        lora_config: The adapter's configuration.
        trainer: What a trainer needs to resume. Unset: the state has no such section.

    Returns:
        The state. Its bytes are a copy.

    Raises:
        InvalidManifest: a name is empty, or there are no adapter weights.
    """
    entries: list[TensorEntry] = []
    parts: list[bytes | memoryview] = []
    offset = 0
    for section, tensors in ((StateSection.ADAPTER, adapter), (StateSection.TRAINER, trainer or {})):
        for name in sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name)):
            tensor = tensors[name]
            entries.append(TensorEntry(name, tensor.dtype, tensor.shape, offset, len(tensor.data), section))
            parts.append(tensor.data)
            offset += len(tensor.data)
    data = b''.join(parts)
    return PackedState(
        WeightManifest(base_model, lora_config, tuple(entries), offset, state_digest(data)), memoryview(data)
    )


def unpack_state(
    manifest: WeightManifest, data: bytes | memoryview, *, section: StateSection = StateSection.ADAPTER
) -> dict[str, TensorData]:
    """Return the tensors of one section as views of `data`, in order of offset.

    Args:
        manifest: Describes `data`.
        data: The state's bytes, or only its first `manifest.adapter_size_bytes` when `section`
            is the adapter's. The result aliases it.
        section: Which part to return.

    Raises:
        StateIncomplete: `data` ends before the section does.
    """
    view = memoryview(data).toreadonly()
    tensors: dict[str, TensorData] = {}
    for entry in manifest.entries_of(section):
        if entry.end > len(view):
            raise StateIncomplete(len(view), manifest.size_bytes)
        tensors[entry.name] = TensorData(entry.dtype, entry.shape, view[entry.offset : entry.end])
    return tensors
