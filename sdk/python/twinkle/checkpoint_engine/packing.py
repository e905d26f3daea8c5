"""Tensors to one byte sequence and back.

Packing copies each tensor once; unpacking copies nothing. The order is fixed by the tensors
alone, so equal tensors give equal bytes and an equal digest, whatever order they came in.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from blake3 import blake3

from twinkle.checkpoint_engine.errors import StateIncomplete
from twinkle.checkpoint_engine.manifest import DTYPE_BYTES, StateSection, TensorEntry, WeightManifest
from twinkle.data_format import LoraConfig, TensorData

_HASHING_THREADS = min(4, os.cpu_count() or 1)
_ALONE_BYTES = 8 << 20
"""Fewer bytes are hashed by one thread: starting others takes as long."""
_KEPT_PLANS = 16
"""So many are not laid out again; a run has one, and its checkpoints another."""

_Parts = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype and shape of tensors, in the order they came."""


@dataclass(frozen=True)
class PackedState:
    """A state: its description and its bytes."""

    manifest: WeightManifest
    """Describes `data`."""
    data: memoryview
    """`manifest.size_bytes` read-only bytes."""


@dataclass(frozen=True)
class StatePlan:
    """Tensors that are to become a state, and where each of them goes."""

    base_model: str
    lora_config: LoraConfig | None
    entries: tuple[TensorEntry, ...]
    parts: tuple[bytes | memoryview, ...]
    """The tensors' bytes, one for each entry."""

    @property
    def size_bytes(self) -> int:
        """Bytes that the state will have."""
        return self.entries[-1].end if self.entries else 0

    def digest(self) -> str:
        """Return blake3 of the state, read where its tensors lie."""
        hasher = blake3()
        for part in self.parts:
            hasher.update(part)
        return hasher.hexdigest()

    def describe(self, digest: str) -> WeightManifest:
        """Return the manifest of the state, whose digest is known already.

        Raises:
            InvalidManifest: a name is empty, or there are no weights.
        """
        return WeightManifest(self.base_model, self.lora_config, self.entries, self.size_bytes, digest)

    def pack(self) -> PackedState:
        """Return the state in memory of its own.

        Raises:
            InvalidManifest: a name is empty, or there are no weights.
        """
        data = b''.join(self.parts)
        return PackedState(self.describe(state_digest(data)), memoryview(data))


def state_digest(data: bytes | bytearray | memoryview) -> str:
    """Return blake3 of `data` as 64 lower-case hexadecimal digits."""
    # Threads of its own, not blake3's shared ones: those do not survive a fork.
    thread_count = _HASHING_THREADS if len(data) > _ALONE_BYTES else 1
    return blake3(data, max_threads=thread_count).hexdigest()


def pack_state(
    weights: Mapping[str, TensorData],
    *,
    base_model: str,
    lora_config: LoraConfig | None,
    trainer: Mapping[str, TensorData] | None = None,
) -> PackedState:
    """Lay tensors one after the other and describe the result.

    Within a section the tensors lie by falling element size, then by name: this is the order
    of the safetensors library, and keeps every tensor aligned to its element.

    Args:
        weights: The adapter's weights by peft's names, or the model's by its own; at least one. Only read.
        base_model: Hub id of the base model.
        lora_config: The adapter's configuration. None: the weights are the model's own.
        trainer: What a trainer needs to resume. Unset: the state has no such section.

    Returns:
        The state. Its bytes are a copy.

    Raises:
        InvalidManifest: a name is empty, or there are no weights.
    """
    return plan_state(weights, base_model=base_model, lora_config=lora_config, trainer=trainer).pack()


def plan_state(
    weights: Mapping[str, TensorData],
    *,
    base_model: str,
    lora_config: LoraConfig | None,
    trainer: Mapping[str, TensorData] | None = None,
) -> StatePlan:
    """Lay tensors out as `pack_state` does, without copying them yet.

    Args:
        weights: As for `pack_state`; not to be changed before the plan was carried out.
        base_model: Hub id of the base model.
        lora_config: The adapter's configuration. None: the weights are the model's own.
        trainer: What a trainer needs to resume. Unset: the state has no such section.
    """
    trainer = trainer or {}
    section_of_weights = StateSection.MODEL if lora_config is None else StateSection.ADAPTER
    entries = _lay_out(section_of_weights, _parts_of(weights), _parts_of(trainer))
    sources = {section_of_weights: weights, StateSection.TRAINER: trainer}
    parts = tuple(sources[entry.section][entry.name].data for entry in entries)
    return StatePlan(base_model, lora_config, entries, parts)


def _parts_of(tensors: Mapping[str, TensorData]) -> _Parts:
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


@lru_cache(maxsize=_KEPT_PLANS)
def _lay_out(section_of_weights: StateSection, weights: _Parts, trainer: _Parts) -> tuple[TensorEntry, ...]:
    """Return where tensors go. Versions of a run have equal parts, and so the very same entries."""
    entries: list[TensorEntry] = []
    offset = 0
    for section, parts in ((section_of_weights, weights), (StateSection.TRAINER, trainer)):
        for name, dtype, shape in sorted(parts, key=lambda part: (-DTYPE_BYTES[part[1]], part[0])):
            size_bytes = prod(shape) * DTYPE_BYTES[dtype]
            entries.append(TensorEntry(name, dtype, shape, offset, size_bytes, section))
            offset += size_bytes
    return tuple(entries)


def unpack_state(
    manifest: WeightManifest, data: bytes | memoryview, *, section: StateSection | None = None
) -> dict[str, TensorData]:
    """Return the tensors of one section as views of `data`, in order of offset.

    Args:
        manifest: Describes `data`.
        data: The state's bytes, or only its first `manifest.weights_size_bytes` when `section`
            is that of the weights. The result aliases it.
        section: Which part to return. Unset: the weights.

    Raises:
        StateIncomplete: `data` ends before the section does.
    """
    view = memoryview(data).toreadonly()
    tensors: dict[str, TensorData] = {}
    for entry in manifest.entries_of(section or manifest.weights_section):
        if entry.end > len(view):
            raise StateIncomplete(len(view), manifest.size_bytes)
        tensors[entry.name] = TensorData(entry.dtype, entry.shape, view[entry.offset : entry.end])
    return tensors
