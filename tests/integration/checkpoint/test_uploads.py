"""Uploads of checkpoints over loopback: archives from other tools, interrupted streams, and invalid archives."""

import asyncio
import io
import json
import random
import tarfile
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import ALICE, Running, as_tenant, failure_of, make_state, serving, stream_of
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as wire
from twinkle.checkpoint_engine import StateChunk, iter_chunks, read_peft_folder, unpack_state, write_peft_folder
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights.wire import chunk_to_proto

ALICE_CALLS = as_tenant('alice')
MIB = 1 << 20


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    """A service with an empty store; calls are made for Alice by default."""
    async with serving(tmp_path, state_limit_bytes=64 * MIB) as running:
        with acting_for(ALICE):
            yield running


def _tar(files: dict[str, bytes | str]) -> bytes:
    """Return an archive; a string is the target of a symbolic link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _peft_files(tmp_path: Path) -> dict[str, bytes]:
    state = make_state(1)
    write_peft_folder(
        tmp_path / 'peft',
        unpack_state(state.manifest, state.data),
        state.manifest.lora_config,
        base_model='somewhere/else',
    )
    return {f'run/{path.name}': path.read_bytes() for path in (tmp_path / 'peft').iterdir()}


def _header(size_bytes: int, **fields: Any) -> wire.UploadCheckpointRequest:
    values = {'upload_id': 'up-1', 'name': 'final', 'base_model': 'org/tiny', 'size_bytes': size_bytes} | fields
    return wire.UploadCheckpointRequest(header=wire.CheckpointUploadHeader(**values))


def _chunks(data: bytes, *, offset: int = 0, chunk_bytes: int = 700) -> list[wire.UploadCheckpointRequest]:
    return [
        wire.UploadCheckpointRequest(chunk=chunk_to_proto(chunk))
        for chunk in iter_chunks(data, offset=offset, chunk_bytes=chunk_bytes)
    ]


def _upload(service: Running, *parts: wire.UploadCheckpointRequest, tenant_id: str = 'alice') -> Any:
    return service.checkpoints.UploadCheckpoint(stream_of(*parts), metadata=as_tenant(tenant_id))


async def test_uploaded_folder_becomes_a_checkpoint(service: Running, tmp_path: Path) -> None:
    """An uploaded folder becomes a bitwise equal checkpoint, and a repeated upload returns the same checkpoint."""
    data = _tar({'run/README.md': b'hello', **_peft_files(tmp_path)})
    uploaded = (await _upload(service, _header(len(data)), *_chunks(data))).checkpoint
    assert (uploaded.base_model, uploaded.name, uploaded.is_optimizer_included) == ('org/tiny', 'final', False)
    received = await service.weights.fetch_checkpoint(uploaded.path)
    state = make_state(1)
    assert unpack_state(received.state.manifest, received.state.data) == unpack_state(state.manifest, state.data)
    assert received.state.manifest.lora_config == state.manifest.lora_config
    assert (await _upload(service, _header(len(data)), *_chunks(data))).checkpoint == uploaded
    assert not list((service.state_dir / 'checkpoint-uploads').iterdir())


async def test_an_archive_may_be_sent_with_sha256(service: Running, tmp_path: Path) -> None:
    """An archive without xxh3 checksums and with SHA-256 becomes a checkpoint; a wrong digest discards it."""
    data = _tar(_peft_files(tmp_path))
    chunks = [wire.UploadCheckpointRequest(chunk={'data': data, 'sha256': sha256(data).digest()})]
    failure = await failure_of(_upload(service, _header(len(data), sha256=bytes(32)), *chunks))
    assert (failure.reason, failure.metadata['field']) == ('DIGEST_MISMATCH', 'header.sha256')
    assert not list((service.state_dir / 'checkpoint-uploads').iterdir())
    uploaded = await _upload(service, _header(len(data), sha256=sha256(data).digest()), *chunks)
    received = (await service.weights.fetch_checkpoint(uploaded.checkpoint.path)).state
    assert received.manifest.digest == uploaded.checkpoint.digest


async def test_an_archive_may_be_sent_without_checksums(service: Running, tmp_path: Path) -> None:
    """An archive without checksums becomes a checkpoint; other bytes at a stored offset are refused."""
    data = _tar(_peft_files(tmp_path))
    first, other, rest = (
        wire.UploadCheckpointRequest(chunk={'offset': offset, 'data': piece})
        for offset, piece in ((0, data[:900]), (0, b'x' * 900), (900, data[900:]))
    )
    assert (await failure_of(_upload(service, _header(len(data)), first))).metadata['offset'] == '900'
    refused = await failure_of(_upload(service, _header(len(data)), other))
    assert (refused.reason, refused.field) == ('INVALID_FIELD', 'chunk')
    assert (await _upload(service, _header(len(data)), first, rest)).checkpoint.name == 'final'


async def test_names_of_other_tools_are_converted_to_peft_names(service: Running, tmp_path: Path) -> None:
    """Tensors whose names contain an adapter name are stored under the standard PEFT names."""
    state = make_state(1)
    tensors = unpack_state(state.manifest, state.data)
    renamed = {name.replace('.weight', '.default.weight'): tensor for name, tensor in tensors.items()}
    write_peft_folder(tmp_path / 'theirs', renamed, state.manifest.lora_config, base_model='m')
    data = _tar({path.name: path.read_bytes() for path in (tmp_path / 'theirs').iterdir()})
    checkpoint = (await _upload(service, _header(len(data)), *_chunks(data))).checkpoint
    assert read_peft_folder(checkpoint.folder)[0] == tensors
    manifest = json.loads((Path(checkpoint.folder) / 'manifest.json').read_text())
    assert '.default.' not in json.dumps(manifest)


@pytest.mark.parametrize('seed', range(10))
async def test_interrupted_upload_resumes(service: Running, tmp_path: Path, seed: int) -> None:
    """An interrupted upload continues from the reported byte or from an earlier byte."""
    rng = random.Random(seed)
    data = _tar(_peft_files(tmp_path))
    parts = [_header(len(data)), *_chunks(data)]
    failure = await failure_of(_upload(service, *parts[: rng.randrange(1, len(parts))]))
    assert failure.reason == 'STREAM_OUT_OF_ORDER'
    received_bytes = int(failure.metadata['offset'])
    gap = await failure_of(_upload(service, parts[0], *_chunks(data, offset=received_bytes + 1)[:1]))
    assert gap.metadata == failure.metadata
    start = rng.choice([received_bytes, 0, received_bytes // 2])
    uploaded = (await _upload(service, parts[0], *_chunks(data, offset=start, chunk_bytes=999))).checkpoint
    state = make_state(1)
    received = (await service.weights.fetch_checkpoint(uploaded.path)).state
    assert unpack_state(received.manifest, received.data) == unpack_state(state.manifest, state.data)


async def test_uploads_of_two_tenants_are_separate(service: Running, tmp_path: Path) -> None:
    """Another tenant's upload with the same id is separate, and its checkpoint is private."""
    data = _tar(_peft_files(tmp_path))
    await failure_of(_upload(service, _header(len(data)), *_chunks(data)[:3]))
    failure = await failure_of(_upload(service, _header(len(data)), tenant_id='bob'))
    assert failure.metadata['offset'] == '0'
    uploaded = (await _upload(service, _header(len(data)), *_chunks(data), tenant_id='bob')).checkpoint
    request = wire.GetCheckpointRequest(checkpoint_path=uploaded.path)
    call = service.checkpoints.GetCheckpoint(request, metadata=ALICE_CALLS)
    assert (await failure_of(call)).reason == 'CHECKPOINT_NOT_FOUND'


def _without(name: str) -> Callable[[dict[str, bytes]], dict[str, Any]]:
    return lambda files: {key: value for key, value in files.items() if not key.endswith(name)}


def _with(name: str, content: bytes | str) -> Callable[[dict[str, bytes]], dict[str, Any]]:
    return lambda files: {**_without(name)(files), f'run/{name}': content}


BAD_ARCHIVES: dict[str, Callable[[dict[str, bytes]], dict[str, Any]]] = {
    'empty': lambda files: {},
    'no weights': _without('adapter_model.safetensors'),
    'no configuration': _without('adapter_config.json'),
    'duplicate file': lambda files: {**files, 'other/adapter_config.json': b'{}'},
    'link': _with('adapter_config.json', '/etc/passwd'),
    'pickle': _with('adapter_model.safetensors', b'\x80\x04pickle'),
    'no JSON': _with('adapter_config.json', b'{'),
    'DoRA': _with('adapter_config.json', b'{"peft_type": "LORA", "r": 4, "target_modules": ["q"], "use_dora": true}'),
    'rank 0': _with('adapter_config.json', b'{"peft_type": "LORA", "r": 0, "target_modules": ["q"]}'),
    'foreign tensor': _with(
        'adapter_model.safetensors',
        (68).to_bytes(8, 'little') + b'{"embed": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}    x',
    ),
}


@pytest.mark.parametrize('case', BAD_ARCHIVES)
async def test_archives_without_a_peft_folder_are_refused(service: Running, tmp_path: Path, case: str) -> None:
    """An archive without a valid PEFT folder is refused and leaves no state."""
    data = _tar(BAD_ARCHIVES[case](_peft_files(tmp_path)))
    failure = await failure_of(_upload(service, _header(len(data)), *_chunks(data)))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', 'chunk')
    assert str(tmp_path) not in failure.message
    assert not service.stored_folders()


async def test_random_bytes_are_refused(service: Running) -> None:
    """Random bytes are refused as an invalid archive."""
    rng = random.Random(0)
    for index in range(20):
        data = rng.randbytes(rng.randrange(1, 5000))
        failure = await failure_of(_upload(service, _header(len(data), upload_id=f'u{index}'), *_chunks(data)))
        assert (failure.code, failure.field) == ('INVALID_ARGUMENT', 'chunk')


@pytest.mark.parametrize(
    ('parts', 'reason', 'field'),
    [
        ([], 'STREAM_OUT_OF_ORDER', ''),
        ([wire.UploadCheckpointRequest()], 'INVALID_FIELD', 'part'),
        (_chunks(b'abc'), 'STREAM_OUT_OF_ORDER', ''),
        ([_header(3), _header(3)], 'STREAM_OUT_OF_ORDER', ''),
        ([_header(3)], 'STREAM_OUT_OF_ORDER', ''),
        ([_header(3), *_chunks(b'abcd')], 'INVALID_FIELD', 'chunk'),
        ([_header(0)], 'INVALID_FIELD', 'header.size_bytes'),
        ([_header(-1)], 'INVALID_FIELD', 'header.size_bytes'),
        ([_header(1 << 40)], 'INVALID_FIELD', 'header.size_bytes'),
        ([_header(3, upload_id='')], 'INVALID_FIELD', 'header.upload_id'),
        ([_header(3, name='a/b')], 'INVALID_FIELD', 'header.name'),
        ([_header(3, base_model='')], 'INVALID_FIELD', 'header.base_model'),
        ([_header(3, sha256=bytes(31))], 'INVALID_FIELD', 'header.sha256'),
        (
            [_header(3), wire.UploadCheckpointRequest(chunk=chunk_to_proto(StateChunk(0, b'abc', 5)))],
            'CHUNK_CORRUPT',
            'chunk.checksum',
        ),
        (
            [_header(3), wire.UploadCheckpointRequest(chunk=chunk_to_proto(StateChunk(-1, b'abc', 5)))],
            'INVALID_FIELD',
            'chunk.offset',
        ),
    ],
)
async def test_bad_uploads_are_refused(service: Running, parts: list[Any], reason: str, field: str) -> None:
    """The error for a malformed upload stream has the reason and, if a field is invalid, its name."""
    failure = await failure_of(_upload(service, *parts))
    assert (failure.reason, failure.field) == (reason, field)


async def test_an_upload_has_one_stream_at_a_time(service: Running) -> None:
    """A second stream of an upload is refused while the first stream is open."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[Any]:
        yield _header(10)
        yield _chunks(b'abc')[0]
        begun.set()
        await release.wait()

    first = service.checkpoints.UploadCheckpoint(slow(), metadata=ALICE_CALLS)
    await begun.wait()
    failure = await failure_of(_upload(service, _header(10)))
    while failure.reason != 'IN_USE':  # the first stream may not have been read yet
        failure = await failure_of(_upload(service, _header(10)))
    release.set()
    assert (await failure_of(first)).reason == 'STREAM_OUT_OF_ORDER'
