"""Checkpoint calls of a client and the command line, with a gateway and a real checkpoint service."""

import asyncio
import sys
import tarfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from typer.testing import CliRunner

from fixtures.checkpoint_service import Running, make_state, serving
from fixtures.running_gateway import RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as wire
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2_grpc
from twinkle.checkpoint_engine import iter_chunks, read_peft_folder, unpack_state, write_peft_folder
from twinkle_client.checkpoints import CheckpointLibrary
from twinkle_client.cli import app
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import NotFoundError, UsageError
from twinkle_services.kit.weights.wire import chunk_to_proto

MODEL = 'org/tiny'
STATE = make_state(1, size_bytes=3 << 20)
TENSORS = unpack_state(STATE.manifest, STATE.data)


@dataclass(frozen=True)
class Deployment:
    """A running gateway and checkpoint service, and the key of a tenant."""

    gateway: RunningGateway
    checkpoints: Running
    secret: str
    adapter: Path
    """A folder in PEFT's format."""

    def run(self, act: Callable[[TwinkleClient, CheckpointLibrary], Any]) -> Any:
        """Return a coroutine that calls `act` in a thread, with a new client and its checkpoint library."""

        def program() -> Any:
            with TwinkleClient(f'http://{self.gateway.address}', self.secret) as client:
                return act(client, CheckpointLibrary(client=client))

        return asyncio.to_thread(program)


@pytest.fixture
async def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    """Run a gateway and a checkpoint service, with an adapter on the client's disk."""
    config = STATE.manifest.lora_config
    assert config is not None
    write_peft_folder(tmp_path / 'adapter', TENSORS, config, base_model=MODEL)
    exports = {'folder': tmp_path / 'out', 'poll': timedelta(milliseconds=20)}
    async with (
        serving(tmp_path / 'checkpoints') as checkpoints,
        running_gateway(
            tmp_path / 'gateway', upstream=checkpoints.address, internal_token='', exports=exports
        ) as gateway,
    ):
        secret = (await gateway.make_key('alice', scopes=(1,))).secret
        monkeypatch.setenv('TWINKLE_SERVER_URL', f'http://{gateway.address}')
        monkeypatch.setenv('TWINKLE_API_KEY', secret)
        monkeypatch.setenv('COLUMNS', '80')
        yield Deployment(gateway, checkpoints, secret, tmp_path / 'adapter')


async def test_uploaded_adapter_downloads_unchanged(deployment: Deployment, tmp_path: Path) -> None:
    """A download equals the upload and leaves no temporary files; a repeated upload returns the same checkpoint."""

    def act(client: TwinkleClient, library: CheckpointLibrary) -> tuple[Any, ...]:
        labels = {'from': 'elsewhere'}
        uploaded = library.upload(deployment.adapter, 'mine', base_model=MODEL, user_metadata=labels)
        repeated = library.upload(deployment.adapter, 'mine', base_model=MODEL)
        progress: list[tuple[int, int]] = []
        folder = client.download_checkpoint(uploaded.path, tmp_path / 'back', report=lambda *at: progress.append(at))
        return uploaded, repeated, folder, progress

    uploaded, repeated, folder, progress = await deployment.run(act)
    assert (uploaded.path, dict(uploaded.user_metadata)) == (repeated.path, {'from': 'elsewhere'})
    assert read_peft_folder(folder)[0] == TENSORS
    names = ['adapter_config.json', 'adapter_model.safetensors']
    assert sorted(path.name for path in folder.iterdir()) == ['README.md', *names]
    assert sorted(path.name for path in deployment.adapter.iterdir()) == names
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1] > len(STATE.data)


async def test_interrupted_upload_is_resumed(deployment: Deployment, tmp_path: Path) -> None:
    """A resumed upload sends only the bytes that the server lacks."""
    archive = tmp_path / 'adapter.tar'
    with tarfile.open(archive, 'w') as tar:
        for path in sorted(deployment.adapter.iterdir()):
            tar.add(path, path.name)
    data = archive.read_bytes()
    upload_id = f'up-{blake3(data).hexdigest()[:40]}'
    header = wire.CheckpointUploadHeader(upload_id=upload_id, name='mine', base_model=MODEL, size_bytes=len(data))
    half = len(data) // 2

    async def interrupted() -> AsyncIterator[wire.UploadCheckpointRequest]:
        yield wire.UploadCheckpointRequest(header=header)
        for chunk in iter_chunks(data[:half], chunk_bytes=1 << 19):
            yield wire.UploadCheckpointRequest(chunk=chunk_to_proto(chunk))

    stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(deployment.gateway.channel)
    failure = await failure_of(stub.UploadCheckpoint(interrupted(), metadata=bearer(deployment.secret)))
    assert failure.metadata['offset'] == str(half)
    sent: list[int] = []
    uploaded = await deployment.run(
        lambda _, library: library.upload(
            archive, 'mine', base_model=MODEL, report=lambda done, total: sent.append(done)
        )
    )
    assert uploaded.name == 'mine'
    assert half < sent[0] <= half + (1 << 20)


async def test_download_restarts_if_the_partial_file_does_not_match(deployment: Deployment, tmp_path: Path) -> None:
    """A partial file is discarded if it belongs to another archive, has no digest, is too long, or is damaged."""
    uploaded = await deployment.run(lambda _, library: library.upload(deployment.adapter, 'mine', base_model=MODEL))
    whole = tmp_path / 'whole'
    await deployment.run(lambda client, _: client.download_checkpoint(uploaded.path, whole))
    request = wire.DownloadCheckpointRequest(checkpoint_path=uploaded.path)
    stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(deployment.gateway.channel)
    pieces = [piece async for piece in stub.DownloadCheckpoint(request, metadata=bearer(deployment.secret))]
    digest, size = pieces[0].archive_digest, pieces[0].archive_size_bytes
    cases = [(b'other', 'f' * 64), (b'other', ''), (bytes(size + 1), digest), (b'x' * 700, digest)]
    for number, (beginning, recorded) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / '.download.tar').write_bytes(beginning)
        (folder / '.download.digest').write_text(recorded)
        await deployment.run(lambda client, _, folder=folder: client.download_checkpoint(uploaded.path, folder))
        assert read_peft_folder(folder)[0] == TENSORS
        assert not list(folder.glob('.*'))


async def test_upload_of_an_invalid_adapter_is_refused(deployment: Deployment, tmp_path: Path) -> None:
    """The client refuses an empty folder or a missing base model, and the server refuses a malformed archive."""
    (tmp_path / 'empty').mkdir()
    for source, base_model, error in (
        (tmp_path / 'empty', MODEL, ValueError),
        (deployment.adapter, '', ValueError),
        (deployment.adapter / 'adapter_config.json', MODEL, UsageError),
    ):
        with pytest.raises(error):
            await deployment.run(
                lambda _, library, source=source, base_model=base_model: library.upload(
                    source, 'mine', base_model=base_model
                )
            )


@pytest.mark.slow
async def test_verify_command_names_damaged_checkpoints(deployment: Deployment) -> None:
    """`verify` prints the state of each checkpoint; for a damaged file it exits with status 1 and gives a solution."""

    async def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, '-m', 'twinkle_client.cli', 'checkpoint', *arguments]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        output, message = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode(), message.decode()

    paths: list[str] = []
    for name in ('first', 'second'):
        _, output, _ = await run('upload', str(deployment.adapter), '--name', name, '--base-model', MODEL)
        paths += [line for line in output.splitlines() if line.startswith('twinkle://')]
    assert sorted((await run('verify'))[1].splitlines()) == sorted(f'{path} ok' for path in paths)
    stored = paths[0].removeprefix('twinkle://')
    (weights,) = deployment.checkpoints.state_dir.glob(f'**/{stored}/*/adapter_model.safetensors')
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for arguments in ([], [paths[0]]):
        status, output, message = await run('verify', *arguments)
        assert status == 1
        lines = [f'{paths[0]} damaged', *(f'{path} ok' for path in paths[1:] if not arguments)]
        assert sorted(output.splitlines()) == sorted(lines)
        assert '1 checkpoint is damaged; delete it, or restore its files from a backup' in message
        assert 'Traceback' not in message
    assert await run('verify', paths[1]) == (0, f'{paths[1]} ok\n', '')
    assert (await run('delete', paths[0]))[0] == 0
    assert await run('verify') == (0, f'{paths[1]} ok\n', '')


async def test_checkpoint_commands(deployment: Deployment, tmp_path: Path) -> None:
    """The commands that upload, publish, expire, list, push, download and delete checkpoints work with a gateway."""

    async def run(*arguments: str, status: int = 0) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, app, ['checkpoint', *arguments])
        assert result.exit_code == status, result.output
        return result.stdout

    output = await run('upload', str(deployment.adapter), '--name', 'mine', '--base-model', MODEL)
    (path,) = [line for line in output.splitlines() if line.startswith('twinkle://')]
    await run('publish', path)
    await run('ttl', path, '30d')
    found = await deployment.run(lambda client, _: client.get_checkpoint(path))
    assert found.is_public
    assert found.HasField('expire_time')
    await run('unpublish', path)
    await run('ttl', path)
    found = await deployment.run(lambda client, _: client.get_checkpoint(path))
    assert not found.is_public
    assert not found.HasField('expire_time')
    assert path in await run('list')
    assert (tmp_path / 'out').as_uri() in await run('push', path, 'file:///here', '--wait')
    assert read_peft_folder(tmp_path / 'out' / 'alice' / 'here')[0] == TENSORS
    assert 'done' in await run('exports')
    await run('push', path, 'hf://org/name', status=1)
    await run('download', path, str(tmp_path / 'back'))
    assert read_peft_folder(tmp_path / 'back')[0] == TENSORS
    (tmp_path / 'existing').mkdir()
    for folder in ('missing', 'existing'):
        await run('download', path.replace('weights', 'nothing'), str(tmp_path / folder), status=1)
    assert not (tmp_path / 'missing').exists()
    assert list((tmp_path / 'existing').iterdir()) == []
    await run('delete', path)
    with pytest.raises(NotFoundError):
        await deployment.run(lambda client, _: client.get_checkpoint(path))
