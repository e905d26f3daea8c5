"""The manifest of a state: its tensors, their offsets and the digest of all bytes.

The constructor validates a manifest, so every instance is consistent. `packing` creates manifests from tensors. The
adapter and version that a state belongs to are not part of the manifest.
"""

import enum
import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from twinkle.checkpoint_engine.errors import InvalidManifest
from twinkle.data_format import LoraConfig

DTYPE_BYTES = {
    'bool': 1,
    'uint8': 1,
    'int32': 4,
    'int64': 8,
    'float16': 2,
    'bfloat16': 2,
    'float32': 4,
    'float64': 8,
}
"""Size of one element in bytes, by dtype name."""

_CACHED_LAYOUTS = 64
"""Number of layouts that are cached to avoid repeated checks. A run has one for versions and one for checkpoints."""
_DIGEST = re.compile(r'[0-9a-f]{64}')


class StateSection(enum.Enum):
    """A part of a state. The weights, of an adapter or of a model, precede the trainer's tensors."""

    ADAPTER = 'adapter'
    """The adapter's weights, by PEFT's names."""
    TRAINER = 'trainer'
    """Data that a trainer needs to resume: optimizer, schedule, counters and random state."""
    MODEL = 'model'
    """Weights of a base model after full-parameter training or a merge, by the names in its checkpoint."""


@dataclass(frozen=True)
class TensorEntry:
    """The position of a tensor in a state."""

    name: str
    """Unique within its section."""
    dtype: str
    """One of `twinkle.data_format.DTYPE_NAMES`."""
    shape: tuple[int, ...]
    """Size of each dimension, outermost first; empty for a scalar."""
    offset: int
    """Offset of its first byte in the state."""
    size_bytes: int
    section: StateSection = StateSection.ADAPTER

    @property
    def end(self) -> int:
        """Offset after its last byte in the state."""
        return self.offset + self.size_bytes


@dataclass(frozen=True, eq=False)
class Layout:
    """Validated entries and values derived from them. All adapter versions of a run share one layout.

    Layouts are compared by identity, so that results computed from hundreds of entries can be cached by layout.
    """

    tensors: tuple[TensorEntry, ...]
    """All entries."""
    weights: tuple[TensorEntry, ...]
    """Entries of the weights section."""
    size_bytes: int
    """Size of all tensors."""
    weights_size_bytes: int
    """Size of the weights section."""


@dataclass(frozen=True)
class WeightManifest:
    """The description of one state. The tensors are in order of offset, without gaps.

    Raises:
        InvalidManifest: a field is inconsistent; the error names the first inconsistent field.
    """

    base_model: str
    """Hub id of the base model that the weights belong to."""
    lora_config: LoraConfig | None
    """Configuration of the adapter. None: the state contains the weights of a model instead of an adapter."""
    tensors: tuple[TensorEntry, ...]
    """Entries in order of offset; the weights precede the trainer's tensors."""
    size_bytes: int
    """Size of the state."""
    digest: str
    """blake3 of the state, 64 lower-case hexadecimal digits."""

    def __post_init__(self) -> None:
        if not self.base_model:
            raise InvalidManifest('base_model', 'is empty; set it to the id of the base model')
        if not _DIGEST.fullmatch(self.digest):
            raise InvalidManifest('digest', 'must be blake3 as 64 lower-case hexadecimal digits')
        end = self.layout.size_bytes
        if end != self.size_bytes:
            raise InvalidManifest('size_bytes', f'is {self.size_bytes}, but the tensors cover {end} bytes')

    @property
    def layout(self) -> Layout:
        """Layout of the tensors. Manifests with the same `tensors` object share one layout."""
        return _layout_of(_Entries(self.tensors, self.weights_section))

    @property
    def weights_section(self) -> StateSection:
        """Section of the weights: `ADAPTER` or `MODEL`."""
        return StateSection.MODEL if self.lora_config is None else StateSection.ADAPTER

    @property
    def weights_size_bytes(self) -> int:
        """Size of the weights, which is also the offset of the trainer section."""
        return self.layout.weights_size_bytes

    @property
    def adapter_size_bytes(self) -> int:
        """Deprecated alias of `weights_size_bytes`."""
        return self.weights_size_bytes

    @property
    def is_trainer_included(self) -> bool:
        """Whether training can resume from this state."""
        return bool(self.tensors) and self.tensors[-1].section is StateSection.TRAINER

    def entries_of(self, section: StateSection) -> tuple[TensorEntry, ...]:
        """Return the entries of one section, in order of offset."""
        if section is self.weights_section:
            return self.layout.weights
        return tuple(entry for entry in self.tensors if entry.section is section)


class _Entries:
    """A cache key that compares entries by identity, because comparing their values costs as much as checking them."""

    __slots__ = ('tensors', 'weights')

    def __init__(self, tensors: tuple[TensorEntry, ...], weights: StateSection) -> None:
        self.tensors = tensors
        self.weights = weights

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Entries) and self.tensors is other.tensors and self.weights is other.weights

    def __hash__(self) -> int:
        return hash((id(self.tensors), id(self.weights)))


@lru_cache(maxsize=_CACHED_LAYOUTS)
def _layout_of(entries: _Entries) -> Layout:
    """Check entries and return their layout. The cached key keeps the entries alive, so their ids are not reused."""
    size_bytes = _check_entries(entries.tensors, entries.weights)
    weights = tuple(entry for entry in entries.tensors if entry.section is entries.weights)
    all_weights = entries.tensors if len(weights) == len(entries.tensors) else weights
    return Layout(entries.tensors, all_weights, size_bytes, weights[-1].end)


def _check_entries(tensors: tuple[TensorEntry, ...], weights: StateSection) -> int:
    """Check every entry against the previous entry; return the end of the last entry."""
    end = 0
    is_trainer_reached = False
    names: set[tuple[StateSection, str]] = set()
    for index, entry in enumerate(tensors):
        path = f'tensors[{index}]'
        _check_entry(entry, path)
        if entry.offset != end:
            raise InvalidManifest(f'{path}.offset', f'is {entry.offset}, but the previous tensor ends at {end}')
        if entry.section not in (weights, StateSection.TRAINER):
            raise InvalidManifest(f'{path}.section', f'must be {weights.value} or trainer, got {entry.section.value}')
        if is_trainer_reached and entry.section is weights:
            raise InvalidManifest(f'{path}.section', 'weights must precede trainer tensors')
        if (entry.section, entry.name) in names:
            raise InvalidManifest(f'{path}.name', f'{entry.name!r} occurs twice')
        is_trainer_reached = entry.section is StateSection.TRAINER
        names.add((entry.section, entry.name))
        end = entry.end
    if not any(section is weights for section, _ in names):
        raise InvalidManifest('tensors', f'contain no {weights.value} weights')
    return end


def _check_entry(entry: TensorEntry, path: str) -> None:
    if not entry.name or entry.name == '__metadata__':
        raise InvalidManifest(f'{path}.name', f'{entry.name!r} is not a valid tensor name')
    if entry.dtype not in DTYPE_BYTES:
        raise InvalidManifest(f'{path}.dtype', f'{entry.dtype!r} is not one of {tuple(DTYPE_BYTES)}')
    if any(size < 0 for size in entry.shape):
        raise InvalidManifest(f'{path}.shape', f'{entry.shape} has a negative size')
    expected = prod(entry.shape) * DTYPE_BYTES[entry.dtype]
    if entry.size_bytes != expected:
        raise InvalidManifest(f'{path}.size_bytes', f'is {entry.size_bytes}, but its shape and dtype need {expected}')
