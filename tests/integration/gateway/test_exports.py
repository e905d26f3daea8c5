"""Tests of exports of checkpoints to a hub and to folders, through a gateway with a real checkpoint service."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from fixtures.checkpoint_service import Running, as_tenant, make_state, serving
from fixtures.fake_hub import FakeHub, running_hub
from fixtures.running_gateway import RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, weights_pb2
from twinkle.api.error.v1 import error_reason_pb2
from twinkle.api.gateway.v1 import export_service_pb2 as messages
from twinkle.api.gateway.v1 import export_service_pb2_grpc
from twinkle.checkpoint_engine import read_peft_folder, unpack_state
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.exports.sql import SqlExportStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.context import acting_for

PATH = 'twinkle://ad-1/weights/best'
HUB = 'hf://org/name'
TOKEN = 'hf_right'
STATE = make_state(1)
FINISHED = {messages.EXPORT_STATE_DONE, messages.EXPORT_STATE_FAILED, messages.EXPORT_STATE_CANCELLED}
LEASE = timedelta(seconds=6)


@dataclass(frozen=True)
class Deployment:
    """A gateway and a checkpoint service, with the keys of two tenants."""

    gateway: RunningGateway
    checkpoints: Running
    secrets: dict[str, str]
    state_dir: Path

    @property
    def stub(self) -> export_service_pb2_grpc.ExportServiceStub:
        """Stub of the export service."""
        return export_service_pb2_grpc.ExportServiceStub(self.gateway.channel)

    def start(self, *, key: str = 'alice', **fields: Any) -> Any:
        """Return the call that starts an export."""
        request: dict[str, Any] = {
            'request_id': 'rq-1',
            'checkpoint_path': PATH,
            'target': HUB,
            'hub_token': TOKEN,
            **fields,
        }
        return self.stub.StartExport(messages.StartExportRequest(**request), metadata=bearer(self.secrets[key]))

    async def get(self, export_id: str, *, key: str = 'alice') -> messages.Export:
        request = messages.GetExportRequest(export_id=export_id)
        return (await self.stub.GetExport(request, metadata=bearer(self.secrets[key]))).export

    async def wait_until(self, export_id: str, condition: Callable[[messages.Export], bool]) -> messages.Export:
        """Return an export once a condition holds; the timeout of the test limits the wait."""
        while True:
            export = await self.get(export_id)
            if condition(export):
                return export

    async def wait_until_finished(self, export_id: str) -> messages.Export:
        """Return an export once it is finished."""
        return await self.wait_until(export_id, lambda export: export.state in FINISHED)


@asynccontextmanager
async def exporting(state_dir: Path, checkpoints: Running, **exports: Any) -> AsyncIterator[Deployment]:
    """Run a gateway in front of a checkpoint service, with keys for the tenants alice and bob."""
    options = {'folder': state_dir / 'out', 'poll': timedelta(milliseconds=20), 'lease': LEASE, **exports}
    async with running_gateway(state_dir, upstream=checkpoints.address, internal_token='', exports=options) as gateway:
        secrets = {name: (await gateway.make_key(name, scopes=(1,))).secret for name in ('alice', 'bob')}
        yield Deployment(gateway, checkpoints, secrets, state_dir)


@pytest.fixture
async def checkpoints(tmp_path: Path) -> AsyncIterator[Running]:
    """A checkpoint service with a checkpoint of alice."""
    async with serving(tmp_path / 'checkpoints') as running:
        await save(running)
        yield running


async def save(checkpoints: Running, seed: int = 1) -> None:
    """Save alice's checkpoint, or replace it."""
    with acting_for(Caller(tenant_id='alice', is_internal=True)):
        target = weights_pb2.CheckpointTarget(name='best', is_overwrite_allowed=True)
        await checkpoints.weights.save_checkpoint('ad-1', make_state(seed), target)


@pytest.fixture
async def deployment(tmp_path: Path, checkpoints: Running) -> AsyncIterator[Deployment]:
    """A gateway in front of the checkpoint service."""
    async with exporting(tmp_path / 'gateway', checkpoints) as running:
        yield running


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A fake hub that the gateway uses instead of Hugging Face."""
    with running_hub() as running:
        monkeypatch.setenv('HF_ENDPOINT', running.url)
        monkeypatch.setenv('HF_HUB_DISABLE_XET', '1')
        monkeypatch.setenv('HF_TOKEN', 'hf_of_the_operator')
        yield running


def has_checkpoint(files: dict[str, bytes], folder: Path) -> bool:
    """Write PEFT files to a folder, and return whether their content is that of the checkpoint."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return read_peft_folder(folder)[0] == unpack_state(STATE.manifest, STATE.data)


async def test_checkpoint_is_exported_to_a_hub(deployment: Deployment, hub: FakeHub, tmp_path: Path) -> None:
    """An export makes one private commit with the tenant's token, and a repeated request returns the same export."""
    started_export = (await deployment.start()).export
    done = await deployment.wait_until_finished(started_export.export_id)
    assert done.state == messages.EXPORT_STATE_DONE
    assert (done.url, done.commit, done.attempt_count) == (f'{hub.url}/org/name', f'{1:040x}', 1)
    assert done.read_bytes == done.size_bytes > len(STATE.data)
    assert has_checkpoint(hub.files['org/name'], tmp_path / 'seen')
    assert ModelCard(hub.files['org/name']['README.md'].decode()).data.base_model == 'org/tiny'
    assert hub.is_private == {'org/name': True}
    assert (await deployment.start()).export == done
    assert hub.commits == 1


async def test_checkpoint_is_exported_to_the_tenants_folder(deployment: Deployment, tmp_path: Path) -> None:
    """An export to a folder writes below the tenant's folder, and leaves other files there unchanged."""
    target = tmp_path / 'gateway' / 'out' / 'alice' / 'a' / 'b'
    target.mkdir(parents=True)
    (target / 'README.md').write_text('existing')
    started_export = (await deployment.start(target='file:///a/b', hub_token='')).export
    done = await deployment.wait_until_finished(started_export.export_id)
    assert (done.state, done.url, done.commit) == (messages.EXPORT_STATE_DONE, target.as_uri(), '')
    assert sorted(path.name for path in target.iterdir()) == [
        'README.md',
        'adapter_config.json',
        'adapter_model.safetensors',
    ]
    assert (target / 'README.md').read_text() == 'existing'
    assert read_peft_folder(target)[0] == unpack_state(STATE.manifest, STATE.data)
    assert not list((tmp_path / 'gateway' / 'exports').iterdir())


async def test_unreachable_hub_is_retried(deployment: Deployment, hub: FakeHub) -> None:
    """An export that cannot reach the hub has the error and is retried; no file contains the token in plain text."""
    hub.broken = 'commit'
    started_export = (await deployment.start()).export
    waiting = await deployment.wait_until(started_export.export_id, lambda export: export.HasField('failure'))
    assert waiting.state == messages.EXPORT_STATE_WAITING
    assert waiting.failure.reason == error_reason_pb2.ERROR_REASON_SERVICE_UNREACHABLE
    files = [path for path in deployment.state_dir.rglob('*') if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)
    hub.broken = ''
    deployment.gateway.clock.advance(timedelta(minutes=1))
    done = await deployment.wait_until_finished(started_export.export_id)
    assert (done.state, done.attempt_count, hub.commits) == (messages.EXPORT_STATE_DONE, 2, 1)
    assert not done.HasField('failure')


@pytest.mark.parametrize(
    ('fields', 'attempts'), [({'hub_token': 'hf_wrong'}, 1), ({'target': 'hf://stranger/name'}, 1)]
)
async def test_refusal_of_a_hub_is_final(
    deployment: Deployment, hub: FakeHub, fields: dict[str, str], attempts: int
) -> None:
    """An export that the hub refuses fails after one attempt, with a message that does not contain the token."""
    started_export = (await deployment.start(**fields)).export
    failed = await deployment.wait_until_finished(started_export.export_id)
    assert (failed.state, failed.attempt_count) == (messages.EXPORT_STATE_FAILED, attempts)
    assert failed.failure.reason == error_reason_pb2.ERROR_REASON_HUB_REFUSED
    assert 'hf_' not in failed.failure.message
    assert not hub.commits


async def test_export_resumes_after_a_kill_with_one_result(tmp_path: Path, checkpoints: Running, hub: FakeHub) -> None:
    """The claimed export of a killed gateway is taken over after its lease, and the hub gets no second commit."""
    state_dir = tmp_path / 'gateway'
    async with exporting(state_dir, checkpoints, at_once=0) as deployment:
        first = (await deployment.start()).export
        second = (await deployment.start(request_id='rq-2', target='file:///x', hub_token='')).export
        database = await Database.open(GatewayConfig(state_dir=state_dir).database_address())
        store, now = SqlExportStore(database), deployment.gateway.clock.now()
        claims = [await store.claim(now, lease=LEASE) for _ in range(2)]
        assert {claim.export_id for claim in claims if claim} == {first.export_id, second.export_id}
        assert await store.claim(now, lease=LEASE) is None
        await database.close()
    async with exporting(state_dir, checkpoints) as deployment:
        third = (await deployment.start(request_id='rq-3', is_private=False)).export
        assert (await deployment.wait_until_finished(third.export_id)).state == messages.EXPORT_STATE_DONE
        assert (await deployment.get(first.export_id)).state == messages.EXPORT_STATE_RUNNING
        deployment.gateway.clock.advance(LEASE)
        for export_id in (first.export_id, second.export_id):
            done = await deployment.wait_until_finished(export_id)
            assert (done.state, done.attempt_count) == (messages.EXPORT_STATE_DONE, 2)
        assert hub.commits == 1


async def test_export_resumes_immediately_after_a_shutdown(tmp_path: Path, checkpoints: Running, hub: FakeHub) -> None:
    """A gateway that shuts down releases its running exports, and the next gateway resumes them."""
    hub.delay_seconds = 60
    async with exporting(tmp_path / 'gateway', checkpoints) as deployment:
        started_export = (await deployment.start()).export
        await asyncio.to_thread(hub.asked.wait)
    hub.delay_seconds = 0
    async with exporting(tmp_path / 'gateway', checkpoints) as deployment:
        assert (await deployment.wait_until_finished(started_export.export_id)).state == messages.EXPORT_STATE_DONE
        assert hub.commits == 1


async def test_cancellation_stops_a_running_upload(deployment: Deployment, hub: FakeHub) -> None:
    """Cancelling stops the upload and removes its files, and cancelling again changes nothing."""
    hub.delay_seconds = 60
    started_export = (await deployment.start()).export
    await asyncio.to_thread(hub.asked.wait)
    request, metadata = (
        messages.CancelExportRequest(export_id=started_export.export_id),
        bearer(deployment.secrets['alice']),
    )
    cancelled = (await deployment.stub.CancelExport(request, metadata=metadata)).export
    assert cancelled.state == messages.EXPORT_STATE_CANCELLED
    folder = deployment.state_dir / 'exports'
    while any(folder.iterdir()):
        await deployment.get(started_export.export_id)
    assert (await deployment.stub.CancelExport(request, metadata=metadata)).export == cancelled
    assert not hub.commits


async def test_replaced_checkpoint_is_not_exported(tmp_path: Path, checkpoints: Running) -> None:
    """An export fails if its checkpoint was replaced before the export ran."""
    async with exporting(tmp_path / 'gateway', checkpoints, at_once=0) as deployment:
        started_export = (await deployment.start(target='file:///x', hub_token='')).export
    await save(checkpoints, seed=2)
    async with exporting(tmp_path / 'gateway', checkpoints) as deployment:
        failed = await deployment.wait_until_finished(started_export.export_id)
        assert failed.failure.reason == error_reason_pb2.ERROR_REASON_CHECKPOINT_CHANGED
        assert not (tmp_path / 'gateway' / 'out').exists()


async def test_exports_of_another_tenant_are_not_found(deployment: Deployment) -> None:
    """A tenant cannot read, list or cancel another tenant's exports, or export another tenant's checkpoints."""
    started_export = (await deployment.start(target='file:///x', hub_token='')).export
    bob = bearer(deployment.secrets['bob'])
    for call in (
        deployment.stub.GetExport(messages.GetExportRequest(export_id=started_export.export_id), metadata=bob),
        deployment.stub.CancelExport(messages.CancelExportRequest(export_id=started_export.export_id), metadata=bob),
    ):
        assert (await failure_of(call)).reason == 'EXPORT_NOT_FOUND'
    assert not (await deployment.stub.ListExports(messages.ListExportsRequest(), metadata=bob)).exports
    assert (await failure_of(deployment.start(key='bob'))).reason == 'CHECKPOINT_NOT_FOUND'
    listed = await deployment.stub.ListExports(
        messages.ListExportsRequest(), metadata=bearer(deployment.secrets['alice'])
    )
    assert [export.export_id for export in listed.exports] == [started_export.export_id]


async def test_repeated_request_succeeds_after_the_checkpoint_is_deleted(tmp_path: Path, checkpoints: Running) -> None:
    """A repeated request returns its export even if the checkpoint has been deleted."""
    async with exporting(tmp_path / 'gateway', checkpoints, at_once=0) as deployment:
        started_export = (await deployment.start()).export
        deletion = checkpoint_service_pb2.DeleteCheckpointRequest(checkpoint_path=PATH)
        await checkpoints.checkpoints.DeleteCheckpoint(deletion, metadata=as_tenant('alice'))
        assert (await deployment.start()).export == started_export
        assert (await failure_of(deployment.start(target='hf://org/other'))).reason == 'REQUEST_ID_REUSED'
        assert (await failure_of(deployment.start(request_id='rq-2'))).reason == 'CHECKPOINT_NOT_FOUND'


@pytest.mark.parametrize('obstacle', ['a', 'a/b', 'a/b/adapter_config.json/x'])
async def test_conflicting_file_or_folder_fails_the_export(
    deployment: Deployment, tmp_path: Path, obstacle: str
) -> None:
    """An export fails without a retry if a file exists in place of a folder, or a folder in place of a file."""
    path = tmp_path / 'gateway' / 'out' / 'alice' / obstacle
    path.parent.mkdir(parents=True)
    path.write_text('existing')
    started_export = (await deployment.start(target='file:///a/b', hub_token='')).export
    failed = await deployment.wait_until_finished(started_export.export_id)
    assert (failed.state, failed.attempt_count) == (messages.EXPORT_STATE_FAILED, 1)
    assert failed.failure.reason == error_reason_pb2.ERROR_REASON_INVALID_FIELD
    assert (path.read_text(), str(tmp_path) in failed.failure.message) == ('existing', False)


async def test_disk_error_is_retried(deployment: Deployment, tmp_path: Path) -> None:
    """An export waits with SERVICE_UNREACHABLE after a disk error, until a retry succeeds."""
    path = tmp_path / 'gateway' / 'out' / 'alice'
    path.parent.mkdir(parents=True)
    path.symlink_to(path)
    started_export = (await deployment.start(target='file:///a', hub_token='')).export
    waiting = await deployment.wait_until(started_export.export_id, lambda export: export.HasField('failure'))
    assert waiting.state == messages.EXPORT_STATE_WAITING
    assert waiting.failure.reason == error_reason_pb2.ERROR_REASON_SERVICE_UNREACHABLE
    path.unlink()
    deployment.gateway.clock.advance(timedelta(minutes=1))
    assert (await deployment.wait_until_finished(started_export.export_id)).state == messages.EXPORT_STATE_DONE


@pytest.mark.parametrize(
    ('fields', 'reason'),
    [
        ({'target': 'org/name'}, 'INVALID_FIELD'),
        ({'target': 'hf://name'}, 'INVALID_FIELD'),
        ({'target': 'hf://../x'}, 'INVALID_FIELD'),
        ({'target': 's3://org/name'}, 'INVALID_FIELD'),
        ({'target': 'ms://org/name'}, 'NOT_SUPPORTED_HERE'),
        ({'target': 'file:///../bob/x', 'hub_token': ''}, 'INVALID_FIELD'),
        ({'target': 'file:////etc/x', 'hub_token': ''}, 'INVALID_FIELD'),
        ({'target': 'file:///.ssh', 'hub_token': ''}, 'INVALID_FIELD'),
        ({'target': 'file:///x'}, 'INVALID_FIELD'),
        ({'hub_token': ''}, 'INVALID_FIELD'),
        ({'hub_token': 'hf_\u20ac'}, 'INVALID_FIELD'),
        ({'request_id': ''}, 'INVALID_FIELD'),
        ({'checkpoint_path': 'twinkle://ad-1/weights/none'}, 'CHECKPOINT_NOT_FOUND'),
        ({'checkpoint_path': ''}, 'INVALID_FIELD'),
    ],
)
async def test_invalid_request_is_refused(deployment: Deployment, fields: dict[str, str], reason: str) -> None:
    """An invalid request is refused with its reason, and no export is stored."""
    assert (await failure_of(deployment.start(**fields))).reason == reason
    listed = await deployment.stub.ListExports(
        messages.ListExportsRequest(), metadata=bearer(deployment.secrets['alice'])
    )
    assert not listed.exports


async def test_request_ids_are_unique_and_unfinished_exports_limited(tmp_path: Path, checkpoints: Running) -> None:
    """A request id with other content, and a 17th unfinished export, are refused; an equal push is accepted."""
    async with exporting(tmp_path / 'gateway', checkpoints, at_once=0) as deployment:
        for number in range(16):
            await deployment.start(request_id=f'rq-{number}', target=f'hf://org/name-{number}')
        assert (
            await failure_of(deployment.start(request_id='rq-0', target='hf://org/other'))
        ).reason == 'REQUEST_ID_REUSED'
        assert (await failure_of(deployment.start(request_id='rq-16'))).reason == 'QUOTA_EXCEEDED'
        assert (
            await deployment.start(request_id='rq-3', target='hf://org/name-3')
        ).export.state == messages.EXPORT_STATE_WAITING
        known = await deployment.start(request_id='rq-3', target='hf://org/name-3')
        assert (await deployment.start(request_id='rq-17', target='hf://org/name-3')).export == known.export


async def test_equal_unfinished_push_is_not_repeated(tmp_path: Path, checkpoints: Running) -> None:
    """Equal pushes return one export; another token, target, visibility or checkpoint content creates a new export."""
    async with exporting(tmp_path / 'gateway', checkpoints, at_once=0) as deployment:
        started = await asyncio.gather(*(deployment.start(request_id=f'rq-{number}') for number in range(4)))
        (export_id,) = {response.export.export_id for response in started}
        others: tuple[dict[str, Any], ...] = (
            {'hub_token': 'hf_other'},
            {'target': 'hf://org/other'},
            {'target': 'file:///x', 'hub_token': ''},
            {'is_private': False},
        )
        ids = [
            (await deployment.start(request_id=f'other-{i}', **fields)).export.export_id
            for i, fields in enumerate(others)
        ]
        await save(checkpoints, seed=2)
        ids.append((await deployment.start(request_id='rq-5')).export.export_id)
        assert len({export_id, *ids}) == 1 + len(ids)


async def test_finished_push_can_be_repeated(deployment: Deployment, hub: FakeHub) -> None:
    """A push that repeats a finished push is a new export, for which the hub makes no second commit."""
    started_export = (await deployment.start()).export
    await deployment.wait_until_finished(started_export.export_id)
    again = (await deployment.start(request_id='rq-2')).export
    assert again.export_id != started_export.export_id
    assert (await deployment.wait_until_finished(again.export_id)).state == messages.EXPORT_STATE_DONE
    assert hub.commits == 1


async def test_local_changes_take_effect_without_polling(tmp_path: Path, checkpoints: Running, hub: FakeHub) -> None:
    """Exports that this gateway starts or cancels are handled immediately, although it polls once a day."""
    hub.delay_seconds = 60
    day = timedelta(days=1)
    async with exporting(tmp_path / 'gateway', checkpoints, poll=day, lease=day) as deployment:
        started_export = (await deployment.start()).export
        await asyncio.to_thread(hub.asked.wait)
        request = messages.CancelExportRequest(export_id=started_export.export_id)
        await deployment.stub.CancelExport(request, metadata=bearer(deployment.secrets['alice']))
        folder = deployment.state_dir / 'exports'
        while any(folder.iterdir()):
            await deployment.get(started_export.export_id)
        hub.delay_seconds = 0
        again = (await deployment.start(request_id='rq-2', target='file:///x', hub_token='')).export
        assert (await deployment.wait_until_finished(again.export_id)).state == messages.EXPORT_STATE_DONE
