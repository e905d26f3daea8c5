"""Records and manifests as JSON, for the store on disk."""

import json
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from services.checkpoint.domain import AdapterKey, AdapterVersion, Checkpoint, CheckpointKey, Record
from twinkle.checkpoint_engine import StateSection, TensorEntry, WeightManifest
from twinkle.data_format import LoraConfig


def record_to_json(record: Record, *, generation: str) -> bytes:
    """Return the record and the name of the folder that holds its state."""
    adapter = record.key.adapter
    value: dict[str, Any] = {'generation': generation, 'tenant_id': adapter.tenant_id, 'adapter_id': adapter.adapter_id}
    value |= _version_fields(record) if isinstance(record, AdapterVersion) else _checkpoint_fields(record)
    return (json.dumps(value, indent=2) + '\n').encode()


def record_from_json(data: bytes) -> tuple[Record, str]:
    """Return the record, without its folder, and the name of the folder that holds its state.

    Raises:
        ValueError, KeyError, TypeError: it is no record of ours.
    """
    value = json.loads(data)
    adapter = AdapterKey(value['tenant_id'], value['adapter_id'])
    create_time = datetime.fromisoformat(value['create_time'])
    if 'version' in value:
        return _version(value, adapter, create_time), value['generation']
    return _checkpoint(value, adapter, create_time), value['generation']


def manifest_to_json(manifest: WeightManifest, *, adapter_digest: str) -> bytes:
    """Return the manifest and the digest of its adapter section."""
    tensors = [
        [entry.section.value, entry.name, entry.dtype, list(entry.shape), entry.offset, entry.size_bytes]
        for entry in manifest.tensors
    ]
    value = {
        'base_model': manifest.base_model,
        'lora_config': asdict(manifest.lora_config),
        'tensors': tensors,
        'size_bytes': manifest.size_bytes,
        'digest': manifest.digest,
        'adapter_digest': adapter_digest,
    }
    return json.dumps(value).encode()


def manifest_from_json(data: bytes, *, is_adapter_only: bool) -> WeightManifest:
    """Return the manifest of the state, or of its adapter section.

    Raises:
        ValueError, KeyError, TypeError: it is no manifest of ours.
    """
    value = json.loads(data)
    tensors = tuple(
        TensorEntry(name, dtype, tuple(shape), offset, size_bytes, StateSection(section))
        for section, name, dtype, shape, offset, size_bytes in value['tensors']
    )
    config = LoraConfig.of(value['lora_config'])
    manifest = WeightManifest(value['base_model'], config, tensors, value['size_bytes'], value['digest'])
    return adapter_part(manifest, value['adapter_digest']) if is_adapter_only else manifest


def adapter_part(manifest: WeightManifest, adapter_digest: str) -> WeightManifest:
    """Return the manifest of the adapter section alone."""
    return replace(
        manifest,
        tensors=manifest.entries_of(StateSection.ADAPTER),
        size_bytes=manifest.adapter_size_bytes,
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
    }


def _checkpoint(value: dict[str, Any], adapter: AdapterKey, create_time: datetime) -> Checkpoint:
    expire_time = value['expire_time']
    return Checkpoint(
        key=CheckpointKey(adapter, value['name']),
        base_model=value['base_model'],
        is_optimizer_included=value['is_optimizer_included'],
        size_bytes=value['size_bytes'],
        digest=value['digest'],
        step_count=value['step_count'],
        folder='',
        create_time=create_time,
        expire_time=None if expire_time is None else datetime.fromisoformat(expire_time),
        request_id=value.get('request_id', ''),
    )
