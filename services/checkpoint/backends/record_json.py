"""JSON encoding of records, marks and manifests, for the durable store and for shared memory."""

import json
from dataclasses import asdict, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from blake3 import blake3

from twinkle.checkpoint_engine import Layout, StateSection, TensorEntry, WeightManifest
from twinkle.data_format import LoraConfig, base_model_id
from twinkle_services.checkpoint.domain import AdapterKey, AdapterVersion, Checkpoint, CheckpointKey, NewestMark, Record


def record_to_json(record: Record, *, generation: str) -> bytes:
    """Encode a record and `generation`, the name of the folder with its state."""
    adapter = record.key.adapter
    value: dict[str, Any] = {'generation': generation, 'tenant_id': adapter.tenant_id, 'adapter_id': adapter.adapter_id}
    value |= _version_fields(record) if isinstance(record, AdapterVersion) else _checkpoint_fields(record)
    return _encoded(value)


def record_from_json(data: bytes) -> tuple[Record, str]:
    """Decode a record and the name of the folder with its state; the record's `folder` is empty.

    Raises:
        ValueError, KeyError, TypeError: The data is not a record, or was changed since it was written.
    """
    value = _decoded(data)
    adapter = AdapterKey(value['tenant_id'], value['adapter_id'])
    create_time = datetime.fromisoformat(value['create_time'])
    if 'version' in value:
        return _version(value, adapter, create_time), value['generation']
    return _checkpoint(value, adapter, create_time), value['generation']


def mark_to_json(mark: NewestMark) -> bytes:
    value = {
        'tenant_id': mark.adapter.tenant_id,
        'adapter_id': mark.adapter.adapter_id,
        'newest_version': mark.version,
    }
    return _encoded(value)


def mark_from_json(data: bytes) -> NewestMark:
    """Decode a mark.

    Raises:
        ValueError, KeyError, TypeError: The data is not a mark, or was changed since it was written.
    """
    value = _decoded(data)
    return NewestMark(AdapterKey(value['tenant_id'], value['adapter_id']), int(value['newest_version']))


def _encoded(value: dict[str, Any]) -> bytes:
    return (json.dumps({**value, 'checksum': _checksum(value)}, indent=2) + '\n').encode()


def _decoded(data: bytes) -> dict[str, Any]:
    """Decode an object and check its checksum, which objects of earlier releases lack.

    Raises:
        ValueError, TypeError: The data is not an object, or was changed since it was written.
    """
    value = dict[str, Any](json.loads(data))
    if value.pop('checksum', None) not in (None, _checksum(value)):
        raise ValueError('the content differs from its checksum')
    return value


def _checksum(value: dict[str, Any]) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest()


def manifest_to_json(manifest: WeightManifest, *, adapter_digest: str) -> bytes:
    """Encode a manifest and the digest of its weights section."""
    value = {
        'base_model': manifest.base_model,
        'lora_config': None if manifest.lora_config is None else asdict(manifest.lora_config),
        'size_bytes': manifest.size_bytes,
        'digest': manifest.digest,
        'adapter_digest': adapter_digest,
    }
    return f'{json.dumps(value)[:-1]}, "tensors": {_tensors_json(manifest.layout)}}}'.encode()


@lru_cache(maxsize=32)
def _tensors_json(layout: Layout) -> str:
    """Encode the list of tensors; cached, since the versions of a run have equal layouts."""
    return json.dumps(
        [
            [entry.section.value, entry.name, entry.dtype, list(entry.shape), entry.offset, entry.size_bytes]
            for entry in layout.tensors
        ]
    )


def manifest_from_json(data: bytes, *, is_adapter_only: bool) -> WeightManifest:
    """Decode the manifest of a state, or of its weights section only.

    Raises:
        ValueError, KeyError, TypeError: The data is not a manifest.
    """
    value = json.loads(data)
    tensors = tuple(
        TensorEntry(name, dtype, tuple(shape), offset, size_bytes, StateSection(section))
        for section, name, dtype, shape, offset, size_bytes in value['tensors']
    )
    config = None if value['lora_config'] is None else LoraConfig.of(value['lora_config'])
    manifest = WeightManifest(base_model_id(value['base_model']), config, tensors, value['size_bytes'], value['digest'])
    return adapter_part(manifest, value['adapter_digest']) if is_adapter_only else manifest


def adapter_part(manifest: WeightManifest, adapter_digest: str) -> WeightManifest:
    """Return the manifest of the weights section only."""
    return replace(
        manifest,
        tensors=manifest.entries_of(manifest.weights_section),
        size_bytes=manifest.weights_size_bytes,
        digest=adapter_digest,
    )


def _version_fields(record: AdapterVersion) -> dict[str, Any]:
    return {
        'version': record.version,
        'is_pinned': record.is_pinned,
        'digest': record.digest,
        'size_bytes': record.size_bytes,
        'create_time': record.create_time.isoformat(),
    }


def _version(value: dict[str, Any], adapter: AdapterKey, create_time: datetime) -> AdapterVersion:
    return AdapterVersion(
        adapter=adapter,
        version=value['version'],
        digest=value['digest'],
        size_bytes=value['size_bytes'],
        is_pinned=value['is_pinned'],
        create_time=create_time,
    )


def _checkpoint_fields(record: Checkpoint) -> dict[str, Any]:
    return {
        'name': record.key.name,
        'base_model': record.base_model,
        'is_optimizer_included': record.is_optimizer_included,
        'step_count': record.step_count,
        'digest': record.digest,
        'size_bytes': record.size_bytes,
        'create_time': record.create_time.isoformat(),
        'expire_time': None if record.expire_time is None else record.expire_time.isoformat(),
        'request_id': record.request_id,
        'is_public': record.is_public,
        'user_metadata': dict(record.user_metadata),
        'lora_rank': record.lora_rank,
        'target_modules': list(record.target_modules),
    }


def _checkpoint(value: dict[str, Any], adapter: AdapterKey, create_time: datetime) -> Checkpoint:
    expire_time = value['expire_time']
    return Checkpoint(
        key=CheckpointKey(adapter, value['name']),
        base_model=base_model_id(value['base_model']),
        is_optimizer_included=value['is_optimizer_included'],
        size_bytes=value['size_bytes'],
        digest=value['digest'],
        step_count=value['step_count'],
        folder='',
        create_time=create_time,
        expire_time=None if expire_time is None else datetime.fromisoformat(expire_time),
        request_id=value.get('request_id', ''),
        is_public=value.get('is_public', False),
        user_metadata=value.get('user_metadata', {}),
        lora_rank=value.get('lora_rank', 0),
        target_modules=tuple(value.get('target_modules', ())),
    )
