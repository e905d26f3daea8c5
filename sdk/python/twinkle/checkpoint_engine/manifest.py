"""What a state is made of: which tensors, where their bytes lie, and the digest of them all.

A manifest is checked when it is made, so one that exists adds up. Making one from tensors is
`packing`; which adapter and version a state becomes is said beside the manifest, not in it.
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
"""Bytes of one element, by dtype name."""

_KEPT_LAYOUTS = 64
"""So many are not checked again; a run has one."""
_DIGEST = re.compile(r'[0-9a-f]{64}')


class StateSection(enum.Enum):
    """Which part of a state a tensor belongs to. The weights come first: an adapter's, or a model's."""

    ADAPTER = 'adapter'
    """The adapter's weights, by peft's names."""
    TRAINER = 'trainer'
    """What a trainer needs to resume: optimizer, schedule, counters, random state."""
    MODEL = 'model'
    """The base model's own weights, by its checkpoint's names, that were trained whole or merged."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place in a state."""

    name: str
    """Unique within its section."""
    dtype: str
    """One of `twinkle.data_format.DTYPE_NAMES`."""
    shape: tuple[int, ...]
    """Size of each dimension, outermost first; empty for a scalar."""
    offset: int
    """Where its bytes begin in the state."""
    size_bytes: int
    """How many bytes it has."""
    section: StateSection = StateSection.ADAPTER
    """Which part it belongs to."""

    @property
    def end(self) -> int:
        """Where its bytes end in the state."""
        return self.offset + self.size_bytes


@dataclass(frozen=True, eq=False)
class Layout:
    """Entries that add up, and what follows from them; the versions of a run share one.

    It is equal to itself alone, so that what is worked out from hundreds of entries can be kept by it.
    """

    tensors: tuple[TensorEntry, ...]
    """All of them."""
    weights: tuple[TensorEntry, ...]
    """Those of the weights."""
    size_bytes: int
    """Bytes of all of them."""
    weights_size_bytes: int
    """Bytes of the weights."""


@dataclass(frozen=True)
class WeightManifest:
    """The description of one state. The tensors lie in order of offset, without gaps."""

    base_model: str
    """Hub id of the base model that the weights belong to."""
    lora_config: LoraConfig | None
    """The adapter's configuration; None where the state has a model's own weights instead of an adapter."""
    tensors: tuple[TensorEntry, ...]
    """In order of offset; the weights' entries before the trainer's."""
    size_bytes: int
    """Bytes of the whole state."""
    digest: str
    """blake3 of the whole state, 64 lower-case hexadecimal digits."""

    def __post_init__(self) -> None:
        """Refuse a description that no bytes could fit.

        Raises:
            InvalidManifest: names the first field that is wrong.
        """
        if not self.base_model:
            raise InvalidManifest('base_model', 'is empty; name the model the adapter belongs to')
        if not _DIGEST.fullmatch(self.digest):
            raise InvalidManifest('digest', 'has to be blake3 as 64 lower-case hexadecimal digits')
        end = self.layout.size_bytes
        if end != self.size_bytes:
            raise InvalidManifest('size_bytes', f'is {self.size_bytes}, the tensors cover {end} bytes')

    @property
    def layout(self) -> Layout:
        """Where the tensors lie: the same object for manifests that share their `tensors`."""
        return _layout_of(_Entries(self.tensors, self.weights_section))

    @property
    def weights_section(self) -> StateSection:
        """Whose weights these are: an adapter's, or the model's own."""
        return StateSection.MODEL if self.lora_config is None else StateSection.ADAPTER

    @property
    def weights_size_bytes(self) -> int:
        """Bytes of the weights, which is where the trainer's section begins."""
        return self.layout.weights_size_bytes

    @property
    def adapter_size_bytes(self) -> int:
        """The same, by its older name."""
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
    """Entries as a key, told apart by identity: to compare hundreds of them costs as much as to check them."""

    __slots__ = ('tensors', 'weights')

    def __init__(self, tensors: tuple[TensorEntry, ...], weights: StateSection) -> None:
        self.tensors = tensors
        self.weights = weights

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Entries) and self.tensors is other.tensors and self.weights is other.weights

    def __hash__(self) -> int:
        return hash((id(self.tensors), id(self.weights)))


@lru_cache(maxsize=_KEPT_LAYOUTS)
def _layout_of(entries: _Entries) -> Layout:
    """Return the layout of entries, checked once; the key keeps them alive, so that no others get their identity."""
    size_bytes = _check_entries(entries.tensors, entries.weights)
    weights = tuple(entry for entry in entries.tensors if entry.section is entries.weights)
    all_weights = entries.tensors if len(weights) == len(entries.tensors) else weights
    return Layout(entries.tensors, all_weights, size_bytes, weights[-1].end)


def _check_entries(tensors: tuple[TensorEntry, ...], weights: StateSection) -> int:
    """Check every entry against the one before it; return where the last one ends."""
    end = 0
    is_trainer_reached = False
    names: set[tuple[StateSection, str]] = set()
    for index, entry in enumerate(tensors):
        path = f'tensors[{index}]'
        _check_entry(entry, path)
        if entry.offset != end:
            raise InvalidManifest(f'{path}.offset', f'is {entry.offset}, the tensor before it ends at {end}')
        if entry.section not in (weights, StateSection.TRAINER):
            raise InvalidManifest(f'{path}.section', f'is {entry.section.value}, the weights are {weights.value}')
        if is_trainer_reached and entry.section is weights:
            raise InvalidManifest(f'{path}.section', 'weights have to come before trainer tensors')
        if (entry.section, entry.name) in names:
            raise InvalidManifest(f'{path}.name', f'{entry.name!r} is there twice')
        is_trainer_reached = entry.section is StateSection.TRAINER
        names.add((entry.section, entry.name))
        end = entry.end
    if not any(section is weights for section, _ in names):
        raise InvalidManifest('tensors', f'hold no {weights.value} weights')
    return end


def _check_entry(entry: TensorEntry, path: str) -> None:
    """Check what can be said of an entry alone."""
    if not entry.name or entry.name == '__metadata__':
        raise InvalidManifest(f'{path}.name', f'{entry.name!r} is no name for a tensor')
    if entry.dtype not in DTYPE_BYTES:
        raise InvalidManifest(f'{path}.dtype', f'{entry.dtype!r} is not one of {tuple(DTYPE_BYTES)}')
    if any(size < 0 for size in entry.shape):
        raise InvalidManifest(f'{path}.shape', f'{entry.shape} has a negative size')
    expected = prod(entry.shape) * DTYPE_BYTES[entry.dtype]
    if entry.size_bytes != expected:
        raise InvalidManifest(f'{path}.size_bytes', f'is {entry.size_bytes}, its shape and dtype need {expected}')
