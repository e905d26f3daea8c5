"""Malformed Publish, Subscribe and Fetch calls are refused, and a refused publish leaves no state."""

import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import (
    ALICE,
    Running,
    chunk_request,
    failure_of,
    make_state,
    publish_frames,
    serving,
    stream_of,
    until,
)
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.checkpoint_engine import chunk_checksum
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights.wire import chunk_from_proto


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    """A service with an empty store; calls are made for Alice by default."""
    async with serving(tmp_path) as running:
        with acting_for(ALICE):
            yield running


def _edit_header(**fields: Any) -> Callable[[list[Any]], list[Any]]:
    def edit(frames: list[Any]) -> list[Any]:
        for name, value in fields.items():
            owner, _, last = name.rpartition('__')
            target = frames[0].frame.header
            for part in owner.split('__') if owner else ():
                target = target.tensors[0] if part == 'tensor' else getattr(target, part)
            setattr(target, last, value)
        return frames

    return edit


def _edit_chunk(**fields: Any) -> Callable[[list[Any]], list[Any]]:
    def edit(frames: list[Any]) -> list[Any]:
        chunk = dataclasses.replace(chunk_from_proto(frames[1].frame.chunk), **fields)
        return [frames[0], chunk_request(chunk), *frames[2:]]

    return edit


def _clear(name: str) -> Callable[[list[Any]], list[Any]]:
    def edit(frames: list[Any]) -> list[Any]:
        frames[0].frame.header.ClearField(name)
        return frames

    return edit


BAD_PUBLISHES = {
    'nothing': (lambda frames: [], 'STREAM_OUT_OF_ORDER', ''),
    'empty frame': (lambda frames: [wire.PublishRequest()], 'INVALID_FIELD', 'frame'),
    'no header': (lambda frames: frames[1:], 'STREAM_OUT_OF_ORDER', ''),
    'commit only': (lambda frames: frames[-1:], 'STREAM_OUT_OF_ORDER', ''),
    'two headers': (lambda frames: [frames[0], *frames], 'STREAM_OUT_OF_ORDER', ''),
    'no chunk': (lambda frames: [frames[0], frames[-1]], 'STREAM_OUT_OF_ORDER', ''),
    'after commit': (lambda frames: [*frames, frames[1]], 'STREAM_OUT_OF_ORDER', ''),
    'chunk twice': (lambda frames: [frames[0], frames[1], *frames[1:]], 'STREAM_OUT_OF_ORDER', ''),
    'gap': (_edit_chunk(offset=8), 'STREAM_OUT_OF_ORDER', ''),
    'negative offset': (_edit_chunk(offset=-8), 'STREAM_OUT_OF_ORDER', ''),
    'chunk beyond the end': (_edit_chunk(data=bytes(5000)), 'INVALID_FIELD', 'frame.chunk'),
    'corrupt chunk': (_edit_chunk(checksum=1), 'CHUNK_CORRUPT', 'frame.chunk.checksum'),
    'other bytes': (
        _edit_chunk(data=bytes(4096), checksum=chunk_checksum(bytes(4096))),
        'DIGEST_MISMATCH',
        'frame.header.manifest.digest',
    ),
    'no encoding': (_edit_header(encoding=0), 'INVALID_FIELD', 'frame.header.encoding'),
    'delta': (_edit_header(encoding=2), 'NOT_BUILT_YET', ''),
    'resume': (_edit_header(resume_offset=5), 'INVALID_FIELD', 'frame.header.resume_offset'),
    'base version': (_edit_header(base_version=5), 'INVALID_FIELD', 'frame.header.base_version'),
    'encoded size': (_edit_header(encoded_size_bytes=5), 'INVALID_FIELD', 'frame.header.encoded_size_bytes'),
    'no adapter': (_edit_header(adapter_id=''), 'INVALID_FIELD', 'frame.header.adapter_id'),
    'path as adapter': (_edit_header(adapter_id='../x'), 'INVALID_FIELD', 'frame.header.adapter_id'),
    'version 0': (_edit_header(version__version=0), 'INVALID_FIELD', 'frame.header.version.version'),
    'version -1': (_edit_header(version__version=-1), 'INVALID_FIELD', 'frame.header.version.version'),
    'checkpoint name': (_edit_header(checkpoint__name='a/b'), 'INVALID_FIELD', 'frame.header.checkpoint.name'),
    'no target': (_clear('version'), 'INVALID_FIELD', 'frame.header'),
    'no manifest': (_clear('manifest'), 'INVALID_FIELD', 'frame.header.manifest.base_model'),
    'size': (_edit_header(manifest__size_bytes=7), 'INVALID_FIELD', 'frame.header.manifest.size_bytes'),
    'negative size': (_edit_header(manifest__size_bytes=-7), 'INVALID_FIELD', 'frame.header.manifest.size_bytes'),
    'digest': (_edit_header(manifest__digest='x'), 'INVALID_FIELD', 'frame.header.manifest.digest'),
    'dtype': (_edit_header(manifest__tensor__dtype=0), 'INVALID_FIELD', 'frame.header.manifest.tensors[0].dtype'),
    'section': (_edit_header(manifest__tensor__section=0), 'INVALID_FIELD', 'frame.header.manifest.tensors[0].section'),
    'trainer in version': (
        _edit_header(manifest__tensor__section=2),
        'INVALID_FIELD',
        'frame.header.manifest.tensors[1].section',
    ),
    'offset': (_edit_header(manifest__tensor__offset=-1), 'INVALID_FIELD', 'frame.header.manifest.tensors[0].offset'),
    'rank': (
        _edit_header(manifest__lora_config__lora_rank=0),
        'INVALID_FIELD',
        'frame.header.manifest.lora_config.lora_rank',
    ),
    'alpha': (
        _edit_header(manifest__lora_config__lora_alpha=float('nan')),
        'INVALID_FIELD',
        'frame.header.manifest.lora_config.lora_alpha',
    ),
}


@pytest.mark.parametrize('case', BAD_PUBLISHES)
async def test_bad_publish_is_refused_with_reason_and_field(service: Running, case: str) -> None:
    """A malformed publish leaves no state; its error contains the reason and, if a field is invalid, its name."""
    edit, reason, field = BAD_PUBLISHES[case]
    frames = edit(publish_frames(make_state(1)))
    failure = await failure_of(service.streams.Publish(stream_of(*frames)))
    assert (failure.reason, failure.field) == (reason, field)
    await until(lambda: not service.stored_folders())
    assert (await failure_of(service.streams.Fetch(_newest()))).reason == 'ADAPTER_NOT_FOUND'


async def test_a_refusal_reaches_a_client_that_is_still_sending(service: Running) -> None:
    """A refusal that is based on the header reaches a client that is still sending chunks."""
    await service.weights.publish_version('ad-1', make_state(1), version=9)
    frames = publish_frames(make_state(2, size_bytes=8 << 20), version=3)
    for _ in range(20):
        assert (await failure_of(service.streams.Publish(stream_of(*frames)))).reason == 'VERSION_CONFLICT'


async def test_oversized_state_is_refused_before_its_bytes(tmp_path: Path) -> None:
    """A state above the size limit is refused after its header."""
    async with serving(tmp_path, state_limit_bytes=1000) as service:
        with acting_for(ALICE):
            failure = await failure_of(service.streams.Publish(stream_of(publish_frames(make_state(1))[0])))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', 'frame.header.manifest.size_bytes')


@pytest.mark.parametrize(
    ('request_', 'field'),
    [
        (wire.SubscribeRequest(), 'adapter_id'),
        (wire.SubscribeRequest(adapter_id='ad-1', held_version=-1), 'held_version'),
        (wire.SubscribeRequest(adapter_id='ad-1', resume_version=-1), 'resume_version'),
        (wire.SubscribeRequest(adapter_id='ad-1', resume_offset=-1), 'resume_offset'),
        (wire.SubscribeRequest(adapter_id='ad-1', resume_version=1, resume_offset=1 << 40), 'resume_offset'),
        (wire.FetchRequest(), 'state'),
        (wire.FetchRequest(version=wire.VersionRef(adapter_id='a b')), 'version.adapter_id'),
        (wire.FetchRequest(version=wire.VersionRef(adapter_id='ad-1', version=-1)), 'version.version'),
        (wire.FetchRequest(version=wire.VersionRef(adapter_id='ad-1'), offset=-1), 'offset'),
        (wire.FetchRequest(version=wire.VersionRef(adapter_id='ad-1'), offset=1 << 40), 'offset'),
    ],
)
async def test_bad_subscribe_and_fetch_name_the_field(service: Running, request_: Any, field: str) -> None:
    """The error for a malformed Subscribe or Fetch names the invalid field."""
    await service.weights.publish_version('ad-1', make_state(1), version=1)
    method = service.streams.Subscribe if isinstance(request_, wire.SubscribeRequest) else service.streams.Fetch
    failure = await failure_of(method(request_))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', field)


def _newest() -> wire.FetchRequest:
    return wire.FetchRequest(version=wire.VersionRef(adapter_id='ad-1'))
