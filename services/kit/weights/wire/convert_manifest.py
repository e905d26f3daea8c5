"""Conversion of manifests and chunks between messages and the library's values, with all checks of manifests."""

from dataclasses import replace
from functools import lru_cache

from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.checkpoint_engine import InvalidManifest, Layout, StateChunk, StateSection, TensorEntry, WeightManifest
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.tensors import dtype_from_proto, dtype_to_proto
from twinkle_services.kit.weights.wire.convert_lora_config import lora_config_from_proto, lora_config_to_proto

_SECTIONS = {
    StateSection.ADAPTER: weights_pb2.STATE_SECTION_ADAPTER,
    StateSection.TRAINER: weights_pb2.STATE_SECTION_TRAINER,
    StateSection.MODEL: weights_pb2.STATE_SECTION_MODEL,
}
_SECTIONS_BY_NUMBER = {number: section for section, number in _SECTIONS.items()}
_CACHE_SIZE = 32
"""Number of entries of each cache. The versions of a run share one entry, because they differ only in the digest."""
_NO_DIGEST = '0' * 64


def manifest_to_proto(manifest: WeightManifest) -> weights_pb2.WeightManifest:
    """Return the message of `manifest`."""
    message = weights_pb2.WeightManifest()
    fill_manifest(message, manifest)
    return message


def fill_manifest(message: weights_pb2.WeightManifest, manifest: WeightManifest) -> None:
    """Write `manifest` into an empty message, which avoids copying it into an enclosing message."""
    message.MergeFromString(_tensors_of(manifest.layout))
    message.base_model = manifest.base_model
    if manifest.lora_config is not None:
        message.lora_config.CopyFrom(lora_config_to_proto(manifest.lora_config))
    message.size_bytes = manifest.size_bytes
    message.digest = manifest.digest


def manifest_from_proto(message: weights_pb2.WeightManifest, field: str) -> WeightManifest:
    """Return the checked manifest of a message.

    Args:
        message: Message to convert.
        field: Path of the message in the request, for errors.

    Raises:
        InvalidField: The manifest is inconsistent, or one of its fields is invalid.
    """
    layout = weights_pb2.WeightManifest()
    layout.CopyFrom(message)
    layout.ClearField('digest')
    try:
        known = _cached_manifest(layout.SerializeToString(deterministic=True), field)
        return replace(known, digest=message.digest)
    except InvalidManifest as error:
        raise InvalidField(f'{field}.{error.field}', error.problem) from error


@lru_cache(maxsize=_CACHE_SIZE)
def _tensors_of(layout: Layout) -> bytes:
    """Return the bytes of a message with only the tensor entries."""
    tensors = [
        weights_pb2.TensorEntry(
            name=entry.name,
            dtype=dtype_to_proto(entry.dtype),
            shape=entry.shape,
            offset=entry.offset,
            size_bytes=entry.size_bytes,
            section=_SECTIONS[entry.section],
        )
        for entry in layout.tensors
    ]
    return weights_pb2.WeightManifest(tensors=tensors).SerializeToString()


@lru_cache(maxsize=_CACHE_SIZE)
def _cached_manifest(data: bytes, field: str) -> WeightManifest:
    """Return the manifest of a message without a digest; the result is cached.

    Raises:
        InvalidField: A field is invalid.
        InvalidManifest: The manifest is inconsistent.
    """
    message = weights_pb2.WeightManifest.FromString(data)
    tensors = tuple(
        _entry_from_proto(entry, f'{field}.tensors[{index}]') for index, entry in enumerate(message.tensors)
    )
    lora_config = None
    if message.HasField('lora_config'):
        lora_config = lora_config_from_proto(message.lora_config, f'{field}.lora_config')
    return WeightManifest(message.base_model, lora_config, tensors, message.size_bytes, _NO_DIGEST)


def chunk_to_proto(chunk: StateChunk) -> tensor_pb2.TensorChunk:
    """Return the message of `chunk`, with a copy of its data."""
    return tensor_pb2.TensorChunk(offset=chunk.offset, data=bytes(chunk.data), checksum=chunk.checksum)


def chunk_from_proto(message: tensor_pb2.TensorChunk) -> StateChunk:
    """Return the unchecked chunk of a message."""
    return StateChunk(message.offset, message.data, message.checksum)


def _entry_from_proto(entry: weights_pb2.TensorEntry, field: str) -> TensorEntry:
    section = _SECTIONS_BY_NUMBER.get(entry.section)
    if section is None:
        raise InvalidField(
            f'{field}.section', 'must be STATE_SECTION_ADAPTER, STATE_SECTION_MODEL or STATE_SECTION_TRAINER'
        )
    dtype = dtype_from_proto(entry.dtype, f'{field}.dtype')
    return TensorEntry(entry.name, dtype, tuple(entry.shape), entry.offset, entry.size_bytes, section)
