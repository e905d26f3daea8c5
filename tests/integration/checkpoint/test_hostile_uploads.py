"""Malicious archives and unsuitable adapters are refused, and leave no files."""

import gzip
import io
import json
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from fixtures.checkpoint_service import ALICE, Running, as_tenant, failure_of, serving, stream_of
from fixtures.tiny_model import build_tiny_model
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as wire
from twinkle.checkpoint_engine import iter_chunks
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights.wire import chunk_to_proto

MIB = 1 << 20
LAYER = 'model.layers.0.self_attn.q_proj'
RANK = 4
CONFIG = {'peft_type': 'LORA', 'r': RANK, 'lora_alpha': 8, 'target_modules': ['q_proj'], 'base_model_name_or_path': ''}


@pytest.fixture(scope='module')
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small base model."""
    return build_tiny_model(tmp_path_factory.mktemp('model'))


@pytest.fixture
async def service(tmp_path: Path, model: Path) -> AsyncIterator[Running]:
    """A service with one base model in its configuration and an empty store."""
    fields = {'base_models': (str(model),), 'state_limit_bytes': 8 * MIB, 'max_lora_rank': 16}
    async with serving(tmp_path, **fields) as running:
        with acting_for(ALICE):
            yield running


class Adapter:
    """Adapter that fits the model; tests change the adapter to make it invalid."""

    def __init__(self, model: Path) -> None:
        out, width = ModelFolder.open(model).entries[f'{LAYER}.weight'].shape
        random = np.random.default_rng(0)
        self.config: dict[str, Any] = dict(CONFIG)
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, Any] = {
            f'base_model.model.{LAYER}.lora_A.weight': random.normal(size=(RANK, width)).astype('<f4'),
            f'base_model.model.{LAYER}.lora_B.weight': random.normal(size=(out, RANK)).astype('<f4'),
        }

    def files(self) -> dict[str, bytes]:
        config = json.dumps(self.config).encode()
        return {'adapter_config.json': config, 'adapter_model.safetensors': save(self.tensors, self.metadata)}

    def archive(self, *extra: tarfile.TarInfo) -> bytes:
        """Return an archive of the adapter's folder that begins with the entries `extra`, which have no content."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode='w') as archive:
            for info in extra:
                archive.addfile(info)
            for name, data in self.files().items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return buffer.getvalue()


def upload(service: Running, data: bytes, base_model: object, *, upload_id: str = 'up', **fields: Any) -> Any:
    """Return a call that uploads an archive."""
    header = wire.CheckpointUploadHeader(
        upload_id=upload_id, name='mine', base_model=str(base_model), size_bytes=len(data), **fields
    )
    chunks = (wire.UploadCheckpointRequest(chunk=chunk_to_proto(chunk)) for chunk in iter_chunks(data))
    requests = stream_of(wire.UploadCheckpointRequest(header=header), *chunks)
    return service.checkpoints.UploadCheckpoint(requests, metadata=as_tenant('alice'))


@pytest.mark.parametrize('pack', [bytes, gzip.compress])
async def test_valid_adapter_is_accepted(
    service: Running, model: Path, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    """A valid archive, compressed or not, becomes a checkpoint with the given labels, and the upload is removed."""
    data = pack(Adapter(model).archive(tarfile.TarInfo('README.md')))
    checkpoint = (await upload(service, data, model, user_metadata={'from': 'elsewhere'})).checkpoint
    assert (dict(checkpoint.user_metadata), checkpoint.lora_rank, checkpoint.base_model) == (
        {'from': 'elsewhere'},
        RANK,
        str(model),
    )
    assert not list((tmp_path / 'checkpoint-uploads').iterdir())


@pytest.mark.parametrize('configured', ['org/tiny', 'hf://org/tiny'])
@pytest.mark.parametrize('named', ['org/tiny', 'hf://org/tiny'])
async def test_adapter_names_its_base_model_with_or_without_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: str, named: str
) -> None:
    """A base model may be named in both forms; the checkpoint names it as in the configuration."""
    monkeypatch.setenv('TWINKLE_HUB_DIR', str(tmp_path / 'mirror'))
    adapter = Adapter(build_tiny_model(tmp_path / 'mirror/models/org/tiny'))
    adapter.config['base_model_name_or_path'] = named
    async with serving(tmp_path / 'state', base_models=(configured,)) as service:
        with acting_for(ALICE):
            checkpoint = (await upload(service, adapter.archive(), named)).checkpoint
            assert checkpoint.base_model == configured
            failure = await failure_of(upload(service, adapter.archive(), 'ms://org/other', upload_id='other'))
            assert failure.reason == 'BASE_MODEL_NOT_FOUND'


def _no_layer(adapter: Adapter) -> None:
    adapter.tensors = {name.replace('q_proj', 'x_proj'): value for name, value in adapter.tensors.items()}
    adapter.config['target_modules'] = ['x_proj']


def _wrong_shape(adapter: Adapter) -> None:
    name = f'base_model.model.{LAYER}.lora_A.weight'
    adapter.tensors[name] = adapter.tensors[name][:, :-1].copy()


def _huge_rank(adapter: Adapter) -> None:
    for name, value in adapter.tensors.items():
        axis = 0 if 'lora_A' in name else 1
        adapter.tensors[name] = np.concatenate([value] * 5, axis)
    adapter.config['r'] = 5 * RANK


def _integers(adapter: Adapter) -> None:
    adapter.tensors = {name: value.astype('<i4') for name, value in adapter.tensors.items()}


def _with_value(number: float) -> Callable[[Adapter], None]:
    def change(adapter: Adapter) -> None:
        adapter.tensors[f'base_model.model.{LAYER}.lora_B.weight'][-1, -1] = number

    return change


def _seed(adapter: Adapter) -> None:
    adapter.metadata['twinkle.seed'] = str(1 << 63)


def _many_layers(adapter: Adapter) -> None:
    """Use 5000 layers, more than an error message may list."""
    values = list(adapter.tensors.values())
    small = [values[0][:, :1].copy(), values[1][:1].copy()]
    adapter.tensors = {f'layers.{n}.q_proj.lora_{"AB"[m]}.weight': small[m] for n in range(5000) for m in range(2)}
    adapter.config['target_modules'] = '.*'


def _no_text(adapter: Adapter) -> None:
    """Use a layer name that cannot be encoded in UTF-8 but can be escaped in JSON."""
    _no_layer(adapter)
    adapter.config['target_modules'] = ['x_proj\ud800']


def _with_config(**fields: Any) -> Callable[[Adapter], None]:
    return lambda adapter: adapter.config.update(fields)


UNSUITABLE: dict[str, tuple[Callable[[Adapter], None], str]] = {
    'layer': (_no_layer, 'x_proj'),
    'shape': (_wrong_shape, LAYER),
    'rank': (_huge_rank, 'rank 20'),
    'claimed rank': (_with_config(r=10**9), 'rank'),
    'integers': (_integers, 'int32'),
    'not a number': (_with_value(float('nan')), 'lora_B'),
    'infinite': (_with_value(float('-inf')), 'lora_B'),
    'dora': (_with_config(use_dora=True), 'use_dora'),
    'saved modules': (_with_config(modules_to_save=['lm_head']), 'modules_to_save'),
    'bias': (_with_config(bias='all'), 'bias'),
    'other kind': (_with_config(peft_type='IA3'), 'peft_type'),
    'alpha': (_with_config(lora_alpha=float('nan')), 'lora_alpha'),
    'tokens': (_with_config(trainable_token_indices=[1]), 'trainable_token_indices'),
    'number': (_with_config(r='4'), 'r ='),
    'infinite alpha': (_with_config(lora_alpha=float('inf')), 'lora_alpha'),
    'alpha of a layer': (_with_config(alpha_pattern={'q_proj': float('nan')}), 'alpha_pattern'),
    'rank of a layer': (_with_config(rank_pattern={'q_proj': 4.0}), 'rank_pattern'),
    'long value': (_with_config(r='4' * 100_000), 'r ='),
    'seed': (_seed, 'seed'),
    'no text': (_no_text, 'target_modules'),
    'many layers': (_many_layers, 'target_modules'),
    'expressions': (_with_config(alpha_pattern={f'.*{number}': 1.0 for number in range(500)}), 'alpha_pattern'),
}


@pytest.mark.parametrize('case', UNSUITABLE)
async def test_unsuitable_adapter_is_refused(service: Running, model: Path, case: str) -> None:
    """The error for an unsuitable adapter names the cause, and a valid adapter can be uploaded afterwards."""
    damage, offending_name = UNSUITABLE[case]
    adapter = Adapter(model)
    damage(adapter)
    failure = await failure_of(upload(service, adapter.archive(), model))
    assert (failure.code, failure.reason, failure.field) == ('INVALID_ARGUMENT', 'INVALID_FIELD', 'chunk')
    assert offending_name in failure.message
    assert not service.stored_folders()
    assert (await upload(service, Adapter(model).archive(), model)).checkpoint.name == 'mine'


async def test_unserved_base_model_is_refused_before_the_upload(service: Running, model: Path, tmp_path: Path) -> None:
    """An upload for an unknown base model is refused before any byte is stored."""
    failure = await failure_of(upload(service, Adapter(model).archive(), 'org/other'))
    assert (failure.code, failure.reason) == ('NOT_FOUND', 'BASE_MODEL_NOT_FOUND')
    assert not (tmp_path / 'checkpoint-uploads').exists()


def _link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo('README.md')
    info.type, info.linkname = kind, '/etc/passwd'
    return info


HOSTILE: dict[str, Callable[[Adapter], bytes]] = {
    'symbolic link': lambda adapter: adapter.archive(_link(tarfile.SYMTYPE)),
    'hard link': lambda adapter: adapter.archive(_link(tarfile.LNKTYPE)),
    'device': lambda adapter: adapter.archive(_link(tarfile.CHRTYPE)),
    'absolute': lambda adapter: adapter.archive(tarfile.TarInfo('/etc/cron.d/x')),
    'upwards': lambda adapter: adapter.archive(tarfile.TarInfo('a/../../x')),
    'many entries': lambda adapter: adapter.archive(*map(tarfile.TarInfo, map(str, range(5000)))),
    'bomb': lambda adapter: gzip.compress(adapter.archive() + bytes(64 * MIB)),
    'cut gzip': lambda adapter: gzip.compress(adapter.archive())[:-20],
    'gzip and more': lambda adapter: gzip.compress(adapter.archive()) + b'more',
    'gzip twice': lambda adapter: gzip.compress(gzip.compress(adapter.archive())),
    'large header': lambda adapter: _header(tarfile.XHDTYPE, 1 << 32) + adapter.archive(),
    'long name': lambda adapter: _header(tarfile.GNUTYPE_LONGNAME, 1 << 32) + adapter.archive(),
    'large member': lambda adapter: _header(tarfile.REGTYPE, 1 << 62) + adapter.archive(),
    'headers in a row': lambda adapter: _header(tarfile.GNUTYPE_LONGNAME, 0) * 600 + adapter.archive(),
    'fields in fields': lambda adapter: _pax(b'2 ' * 400_000 + b'=') + adapter.archive(),
    'many headers': lambda adapter: (_pax(b'9 a=1234\n' * 400) + _header(tarfile.REGTYPE, 0)) * 400 + adapter.archive(),
    'global fields': lambda adapter: _pax(_globals(), tarfile.XGLTYPE) + adapter.archive(),
    'sparse': lambda adapter: _header(tarfile.GNUTYPE_SPARSE, 0) + adapter.archive(),
    'sparse map': lambda adapter: _endless_map() + adapter.archive(),
    'new sparse': lambda adapter: _pax(_NEW_SPARSE) + adapter.archive() + b'1\n' * MIB,
    'pickle': lambda adapter: _tar({'adapter_config.json': b'{}', 'adapter_model.bin': b'\x80\x04.'}),
    'deep': lambda adapter: _tar({**adapter.files(), 'adapter_config.json': b'[' * 100_000}),
    'long number': lambda adapter: _tar({**adapter.files(), 'adapter_config.json': b'{"r": ' + b'9' * 100_000 + b'}'}),
    'long header': lambda adapter: _tar(
        {**adapter.files(), 'adapter_model.safetensors': (1 << 40).to_bytes(8, 'little') + bytes(100)}
    ),
}


def _header(kind: bytes, size_bytes: int) -> bytes:
    info = tarfile.TarInfo('adapter_model.safetensors')
    info.type, info.size = kind, size_bytes
    return info.tobuf(tarfile.GNU_FORMAT)


_NEW_SPARSE = b'22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n'


def _pax(fields: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return _header(kind, len(fields)) + fields + bytes(-len(fields) % tarfile.BLOCKSIZE)


def _globals() -> bytes:
    return b''.join(b'10 x%03d=1\n' % number for number in range(500))


def _endless_map() -> bytes:
    """Return a sparse file in which every map block announces another map block."""
    first = bytearray(_header(tarfile.GNUTYPE_SPARSE, 0))
    first[482] = 1
    first[148:156] = b'%06o\0 ' % tarfile.calc_chksums(bytes(first))[0]
    block = b'00000000001\0' * 42 + b'\1'
    return bytes(first) + block.ljust(tarfile.BLOCKSIZE, b'\0') * 4000


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize('case', HOSTILE)
async def test_hostile_archives_are_refused(service: Running, model: Path, tmp_path: Path, case: str) -> None:
    """A malicious archive is refused as an invalid request, without a local path in the error, and leaves no files."""
    failure = await failure_of(upload(service, HOSTILE[case](Adapter(model)), model))
    assert (failure.code, failure.reason) == ('INVALID_ARGUMENT', 'INVALID_FIELD')
    assert str(tmp_path) not in failure.message
    assert not service.stored_folders()
    assert not list((tmp_path / 'checkpoint-uploads').iterdir())


@pytest.mark.parametrize('base_model', ['', 'm' * 300, 'org/mo\ndel'])
async def test_a_malformed_base_model_is_refused(service: Running, model: Path, base_model: str) -> None:
    """A base model name that is empty, too long or not printable is refused."""
    failure = await failure_of(upload(service, Adapter(model).archive(), base_model))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', 'header.base_model')


async def test_unfinished_uploads_are_limited_per_tenant(service: Running, model: Path) -> None:
    """A tenant may have 16 unfinished uploads; a finished upload does not count."""
    data = Adapter(model).archive()
    header = {'name': 'mine', 'base_model': str(model), 'size_bytes': len(data)}

    def begin(number: int, tenant_id: str = 'alice') -> Any:
        part = wire.UploadCheckpointRequest(header=wire.CheckpointUploadHeader(upload_id=f'up-{number}', **header))
        return service.checkpoints.UploadCheckpoint(stream_of(part), metadata=as_tenant(tenant_id))

    for number in range(16):
        assert (await failure_of(begin(number))).reason == 'STREAM_OUT_OF_ORDER'
    assert (await failure_of(begin(16))).reason == 'QUOTA_EXCEEDED'
    assert (await failure_of(begin(16, 'bob'))).reason == 'STREAM_OUT_OF_ORDER'
    await upload(service, data, model, upload_id='up-3')
    assert (await failure_of(begin(16))).reason == 'STREAM_OUT_OF_ORDER'
