"""Conversion of tensors to a single byte sequence and back.

Packing copies each tensor once; unpacking copies nothing. The order of the tensors in the sequence does not depend on
the input order, so equal tensors give equal bytes and digests.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, SupportsIndex

from blake3 import blake3

from twinkle.checkpoint_engine.errors import StateIncomplete
from twinkle.checkpoint_engine.manifest import DTYPE_BYTES, StateSection, TensorEntry, WeightManifest
from twinkle.data_format import LoraConfig, TensorData
from twinkle.data_format.tensor import picklable

_HASHING_THREADS = min(4, os.cpu_count() or 1)
"""Number of threads that compute the hash of a large state."""
_SINGLE_THREAD_BYTES = 8 << 20
"""Size up to which one thread computes the hash, because starting more threads takes as long as the computation."""
_CACHED_PLANS = 16
"""Number of cached layouts. A run has one for versions and one for checkpoints."""

_Parts = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype and shape of tensors, in input order."""


@dataclass(frozen=True)
class PackedState:
    """A state: its manifest and its bytes."""

    manifest: WeightManifest
    """Description of `data`."""
    data: memoryview
    """`manifest.size_bytes` read-only bytes."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle the state; with protocol 5, its bytes may be transferred without a copy."""
        return _state_over, (self.manifest, picklable(self.data, protocol))


@dataclass(frozen=True)
class StatePlan:
    """The layout of a state, with the tensors that `pack` copies into it."""

    base_model: str
    lora_config: LoraConfig | None
    entries: tuple[TensorEntry, ...]
    parts: tuple[bytes | memoryview, ...]
    """Bytes of each entry's tensor."""

    @property
    def size_bytes(self) -> int:
        """Size of the state."""
        return self.entries[-1].end if self.entries else 0

    def digest(self) -> str:
        """Return blake3 of the state, computed from the tensors without copying them."""
        hasher = blake3()
        for part in self.parts:
            hasher.update(part)
        return hasher.hexdigest()

    def describe(self, digest: str) -> WeightManifest:
        """Return the manifest of the state for a digest that is already known.

        Raises:
            InvalidManifest: a name is empty or invalid, there are no weights, or the digest is malformed.
        """
        return WeightManifest(self.base_model, self.lora_config, self.entries, self.size_bytes, digest)

    def pack(self) -> PackedState:
        """Copy the tensors into a new state.

        Raises:
            InvalidManifest: a name is empty or invalid, or there are no weights.
        """
        data = b''.join(self.parts)
        return PackedState(self.describe(state_digest(data)), memoryview(data))


def _state_over(manifest: WeightManifest, data: bytes | memoryview) -> PackedState:
    return PackedState(manifest, memoryview(data).cast('B').toreadonly())


def state_digest(data: bytes | bytearray | memoryview) -> str:
    """Return blake3 of `data` as 64 lower-case hexadecimal digits."""
    # blake3's shared thread pool does not survive a fork, so each call starts its own threads.
    thread_count = _HASHING_THREADS if len(data) > _SINGLE_THREAD_BYTES else 1
    return blake3(data, max_threads=thread_count).hexdigest()


def pack_state(
    weights: Mapping[str, TensorData],
    *,
    base_model: str,
    lora_config: LoraConfig | None,
    trainer: Mapping[str, TensorData] | None = None,
) -> PackedState:
    """Copy tensors into a state.

    Within a section, tensors are ordered by descending element size, then by name, as in the safetensors library. This
    order aligns every tensor to its element size, relative to the start of its section.

    Args:
        weights: the adapter's weights by PEFT's names, or the model's weights by its names; at least one. Read-only.
        base_model: hub id of the base model.
        lora_config: the adapter's configuration. None: the weights belong to the model.
        trainer: data that a trainer needs to resume. None: the state has no trainer section.

    Returns:
        The state. Its bytes are a copy.

    Raises:
        InvalidManifest: a name is empty or invalid, or there are no weights.
    """
    return plan_state(weights, base_model=base_model, lora_config=lora_config, trainer=trainer).pack()


def plan_state(
    weights: Mapping[str, TensorData],
    *,
    base_model: str,
    lora_config: LoraConfig | None,
    trainer: Mapping[str, TensorData] | None = None,
) -> StatePlan:
    """Compute the layout that `pack_state` uses, without copying the tensors.

    Args:
        weights: see `pack_state`. Must not change before the plan is used.
        base_model: hub id of the base model.
        lora_config: the adapter's configuration. None: the weights belong to the model.
        trainer: data that a trainer needs to resume. None: the state has no trainer section.
    """
    trainer = trainer or {}
    section_of_weights = StateSection.MODEL if lora_config is None else StateSection.ADAPTER
    entries = _lay_out(section_of_weights, _parts_of(weights), _parts_of(trainer))
    sources = {section_of_weights: weights, StateSection.TRAINER: trainer}
    parts = tuple(sources[entry.section][entry.name].data for entry in entries)
    return StatePlan(base_model, lora_config, entries, parts)


def _parts_of(tensors: Mapping[str, TensorData]) -> _Parts:
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


@lru_cache(maxsize=_CACHED_PLANS)
def _lay_out(section_of_weights: StateSection, weights: _Parts, trainer: _Parts) -> tuple[TensorEntry, ...]:
    """Return the entries of tensors. The versions of a run have equal parts and therefore share the entries."""
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
        manifest: describes `data`.
        data: bytes of the state. The first `manifest.weights_size_bytes` bytes are enough if `section` is the weights
            section. The result aliases them.
        section: section to return. None: the weights.

    Raises:
        StateIncomplete: `data` ends before the end of the section.
    """
    view = memoryview(data).toreadonly()
    tensors: dict[str, TensorData] = {}
    for entry in manifest.entries_of(section or manifest.weights_section):
        if entry.end > len(view):
            raise StateIncomplete(len(view), manifest.size_bytes)
        tensors[entry.name] = TensorData(entry.dtype, entry.shape, view[entry.offset : entry.end])
    return tensors
