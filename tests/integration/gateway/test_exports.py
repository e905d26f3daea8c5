"""Checkpoints on their way to a hub and into folders, through a gateway over a real checkpoint service."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import Running, as_tenant, make_state, serving
from fixtures.fake_hub import FakeHub, running_hub
from fixtures.running_gateway import RunningGateway, bearer, failure_of, running_gateway
from services.gateway.config import GatewayConfig
from services.gateway.exports.sql import SqlExportStore
from services.gateway.store.database import Database
from services.kit.caller import Caller
from services.kit.rpc.context import acting_for
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, weights_pb2
from twinkle.api.error.v1 import error_reason_pb2
from twinkle.api.gateway.v1 import export_service_pb2 as messages
from twinkle.api.gateway.v1 import export_service_pb2_grpc
from twinkle.checkpoint_engine import read_peft_folder, unpack_state

PATH = 'twinkle://ad-1/weights/best'
HUB = 'hf://org/name'
TOKEN = 'hf_right'
STATE = make_state(1)
OVER = {messages.EXPORT_STATE_DONE, messages.EXPORT_STATE_FAILED, messages.EXPORT_STATE_CANCELLED}
LEASE = timedelta(seconds=6)


@dataclass(frozen=True)
class World:
    """What is running."""

    gateway: RunningGateway
    checkpoints: Running
    secrets: dict[str, str]
    state_dir: Path

    @property
    def stub(self) -> export_service_pb2_grpc.ExportServiceStub:
        """Exports."""
        return export_service_pb2_grpc.ExportServiceStub(self.gateway.channel)

    def start(self, *, key: str = 'alice', **fields: Any) -> Any:
        """Return the call that asks for an export."""
        order: dict[str, Any] = {
            'request_id': 'rq-1',
            'checkpoint_path': PATH,
            'target': HUB,
            'hub_token': TOKEN,
            **fields,
        }
        return self.stub.StartExport(messages.StartExportRequest(**order), metadata=bearer(self.secrets[key]))

    async def get(self, export_id: str, *, key: str = 'alice') -> messages.Export:
        """Return an export."""
        request = messages.GetExportRequest(export_id=export_id)
        return (await self.stub.GetExport(request, metadata=bearer(self.secrets[key]))).export

    async def until(self, export_id: str, is_so: Callable[[messages.Export], bool]) -> messages.Export:
        """Return an export once it is so; the test's timeout bounds it."""
        while True:
            export = await self.get(export_id)
            if is_so(export):
                return export

    async def until_over(self, export_id: str) -> messages.Export:
        """Return an export once it is over."""
        return await self.until(export_id, lambda export: export.state in OVER)


@asynccontextmanager
async def exporting(state_dir: Path, checkpoints: Running, **exports: Any) -> AsyncIterator[World]:
    """Run a gateway over a checkpoint service, for two tenants of whom Alice has a checkpoint."""
    options = {'folder': state_dir / 'out', 'poll': timedelta(milliseconds=20), 'lease': LEASE, **exports}
    async with running_gateway(state_dir, upstream=checkpoints.address, internal_token='', exports=options) as gateway:
        secrets = {name: (await gateway.make_key(name, scopes=(1,))).secret for name in ('alice', 'bob')}
        yield World(gateway, checkpoints, secrets, state_dir)


@pytest.fixture
async def checkpoints(tmp_path: Path) -> AsyncIterator[Running]:
    """A checkpoint service with Alice's checkpoint."""
    async with serving(tmp_path / 'checkpoints') as running:
        await save(running)
        yield running


async def save(checkpoints: Running, seed: int = 1) -> None:
    """Save Alice's checkpoint, in the place of the one that may be there."""
    with acting_for(Caller(tenant_id='alice', is_internal=True)):
        target = weights_pb2.CheckpointTarget(name='best', is_overwrite_allowed=True)
        await checkpoints.weights.save_checkpoint('ad-1', make_state(seed), target)


@pytest.fixture
async def world(tmp_path: Path, checkpoints: Running) -> AsyncIterator[World]:
    """A gateway over it."""
    async with exporting(tmp_path / 'gateway', checkpoints) as running:
        yield running


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub over loopback, which the gateway takes for Hugging Face's."""
    with running_hub() as running:
        monkeypatch.setenv('HF_ENDPOINT', running.url)
        monkeypatch.setenv('HF_HUB_DISABLE_XET', '1')
        monkeypatch.setenv('HF_TOKEN', 'hf_of_the_operator')
        yield running


def is_all_there(files: dict[str, bytes], folder: Path) -> bool:
    """Say whether files are the checkpoint, as peft reads it."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return read_peft_folder(folder)[0] == unpack_state(STATE.manifest, STATE.data)


async def test_a_checkpoint_goes_to_a_hub(world: World, hub: FakeHub, tmp_path: Path) -> None:
    """As one private commit, under the tenant's token; the same request again is the same export."""
    made = (await world.start()).export
    done = await world.until_over(made.export_id)
    assert done.state == messages.EXPORT_STATE_DONE
    assert (done.url, done.commit, done.attempt_count) == (f'{hub.url}/org/name', f'{1:040x}', 1)
    assert done.read_bytes == done.size_bytes > len(STATE.data)
    assert is_all_there(hub.files['org/name'], tmp_path / 'seen')
    assert hub.is_private == {'org/name': True}
    assert (await world.start()).export == done
    assert hub.commits == 1


async def test_a_checkpoint_goes_into_the_tenants_folder(world: World, tmp_path: Path) -> None:
    """Below the operator's, whoever asks; what is there already of other names stays."""
    target = tmp_path / 'gateway' / 'out' / 'alice' / 'a' / 'b'
    target.mkdir(parents=True)
    (target / 'README.md').write_text('mine')
    made = (await world.start(target='file:///a/b', hub_token='')).export
    done = await world.until_over(made.export_id)
    assert (done.state, done.url, done.commit) == (messages.EXPORT_STATE_DONE, target.as_uri(), '')
    assert sorted(path.name for path in target.iterdir()) == [
        'README.md',
        'adapter_config.json',
        'adapter_model.safetensors',
    ]
    assert read_peft_folder(target)[0] == unpack_state(STATE.manifest, STATE.data)
    assert not list((tmp_path / 'gateway' / 'exports').iterdir())


async def test_a_hub_that_is_away_is_tried_again(world: World, hub: FakeHub) -> None:
    """With what went wrong to be seen meanwhile; the token is neither there nor in the database in clear."""
    hub.broken = 'commit'
    made = (await world.start()).export
    waits = await world.until(made.export_id, lambda export: export.HasField('failure'))
    assert waits.state == messages.EXPORT_STATE_WAITING
    assert waits.failure.reason == error_reason_pb2.ERROR_REASON_SERVICE_UNREACHABLE
    files = [path for path in world.state_dir.rglob('*') if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)
    hub.broken = ''
    world.gateway.clock.advance(timedelta(minutes=1))
    done = await world.until_over(made.export_id)
    assert (done.state, done.attempt_count, hub.commits) == (messages.EXPORT_STATE_DONE, 2, 1)
    assert not done.HasField('failure')


@pytest.mark.parametrize(
    ('fields', 'attempts'), [({'hub_token': 'hf_wrong'}, 1), ({'target': 'hf://stranger/name'}, 1)]
)
async def test_a_hub_that_refuses_is_not_asked_again(
    world: World, hub: FakeHub, fields: dict[str, str], attempts: int
) -> None:
    """It has failed, and says why without the token."""
    made = (await world.start(**fields)).export
    failed = await world.until_over(made.export_id)
    assert (failed.state, failed.attempt_count) == (messages.EXPORT_STATE_FAILED, attempts)
    assert failed.failure.reason == error_reason_pb2.ERROR_REASON_HUB_REFUSED
    assert 'hf_' not in failed.failure.message
    assert not hub.commits


async def test_an_export_goes_on_after_a_kill_and_has_one_result(
    tmp_path: Path, checkpoints: Running, hub: FakeHub
) -> None:
    """A gateway that died after the hub had all of it leaves a claim; its successor ends it, and nothing changes."""
    state_dir = tmp_path / 'gateway'
    async with exporting(state_dir, checkpoints, at_once=0) as world:
        first = (await world.start()).export
        second = (await world.start(request_id='rq-2', target='file:///x', hub_token='')).export
        database = await Database.open(GatewayConfig(state_dir=state_dir).database_address())
        store, now = SqlExportStore(database), world.gateway.clock.now()
        claims = [await store.claim(now, lease=LEASE) for _ in range(2)]
        assert {claim.export_id for claim in claims if claim} == {first.export_id, second.export_id}
        assert await store.claim(now, lease=LEASE) is None
        await database.close()
    async with exporting(state_dir, checkpoints) as world:
        third = (await world.start(request_id='rq-3', is_private=False)).export
        assert (await world.until_over(third.export_id)).state == messages.EXPORT_STATE_DONE
        assert (await world.get(first.export_id)).state == messages.EXPORT_STATE_RUNNING
        world.gateway.clock.advance(LEASE)
        for export_id in (first.export_id, second.export_id):
            done = await world.until_over(export_id)
            assert (done.state, done.attempt_count) == (messages.EXPORT_STATE_DONE, 2)
        assert hub.commits == 1


async def test_an_export_that_is_stopped_goes_on_at_once(tmp_path: Path, checkpoints: Running, hub: FakeHub) -> None:
    """A gateway that ends in good order gives back what it had begun."""
    hub.delay_seconds = 60
    async with exporting(tmp_path / 'gateway', checkpoints) as world:
        made = (await world.start()).export
        await asyncio.to_thread(hub.asked.wait)
    hub.delay_seconds = 0
    async with exporting(tmp_path / 'gateway', checkpoints) as world:
        assert (await world.until_over(made.export_id)).state == messages.EXPORT_STATE_DONE
        assert hub.commits == 1


async def test_a_cancelled_export_ends(world: World, hub: FakeHub) -> None:
    """Also in the middle of an upload, whose process is ended; cancelled again it is as it was."""
    hub.delay_seconds = 60
    made = (await world.start()).export
    await asyncio.to_thread(hub.asked.wait)
    request, metadata = messages.CancelExportRequest(export_id=made.export_id), bearer(world.secrets['alice'])
    cancelled = (await world.stub.CancelExport(request, metadata=metadata)).export
    assert cancelled.state == messages.EXPORT_STATE_CANCELLED
    folder = world.state_dir / 'exports'
    while any(folder.iterdir()):
        await world.get(made.export_id)
    assert (await world.stub.CancelExport(request, metadata=metadata)).export == cancelled
    assert not hub.commits


async def test_a_checkpoint_that_is_replaced_is_not_exported(tmp_path: Path, checkpoints: Running) -> None:
    """What was asked for is gone, and nothing else is sent in its place."""
    async with exporting(tmp_path / 'gateway', checkpoints, at_once=0) as world:
        made = (await world.start(target='file:///x', hub_token='')).export
    await save(checkpoints, seed=2)
    async with exporting(tmp_path / 'gateway', checkpoints) as world:
        failed = await world.until_over(made.export_id)
        assert failed.failure.reason == error_reason_pb2.ERROR_REASON_CHECKPOINT_CHANGED
        assert not (tmp_path / 'gateway' / 'out').exists()


async def test_exports_are_their_tenants_own(world: World) -> None:
    """Another tenant's is absent for every method, and its checkpoint cannot be exported."""
    made = (await world.start(target='file:///x', hub_token='')).export
    bob = bearer(world.secrets['bob'])
    for call in (
        world.stub.GetExport(messages.GetExportRequest(export_id=made.export_id), metadata=bob),
        world.stub.CancelExport(messages.CancelExportRequest(export_id=made.export_id), metadata=bob),
    ):
        assert (await failure_of(call)).reason == 'EXPORT_NOT_FOUND'
    assert not (await world.stub.ListExports(messages.ListExportsRequest(), metadata=bob)).exports
    assert (await failure_of(world.start(key='bob'))).reason == 'CHECKPOINT_NOT_FOUND'
    listed = await world.stub.ListExports(messages.ListExportsRequest(), metadata=bearer(world.secrets['alice']))
    assert [export.export_id for export in listed.exports] == [made.export_id]


async def test_a_repeat_is_answered_when_the_checkpoint_is_gone(tmp_path: Path, checkpoints: Running) -> None:
    """A client that got no answer asks again, maybe late: it is told what became of its export."""
    async with exporting(tmp_path / 'gateway', checkpoints, at_once=0) as world:
        made = (await world.start()).export
        gone = checkpoint_service_pb2.DeleteCheckpointRequest(checkpoint_path=PATH)
        await checkpoints.checkpoints.DeleteCheckpoint(gone, metadata=as_tenant('alice'))
        assert (await world.start()).export == made
        assert (await failure_of(world.start(target='hf://org/other'))).reason == 'REQUEST_ID_REUSED'
        assert (await failure_of(world.start(request_id='rq-2'))).reason == 'CHECKPOINT_NOT_FOUND'


@pytest.mark.parametrize('thing', ['a', 'a/b', 'a/b/adapter_config.json/x'])
async def test_a_folder_that_cannot_be_made_is_the_tenants_to_mend(world: World, tmp_path: Path, thing: str) -> None:
    """A file where the folder or one above would be, a folder where a file would be: no other try would help."""
    place = tmp_path / 'gateway' / 'out' / 'alice' / thing
    place.parent.mkdir(parents=True)
    place.write_text('mine')
    made = (await world.start(target='file:///a/b', hub_token='')).export
    failed = await world.until_over(made.export_id)
    assert (failed.state, failed.attempt_count) == (messages.EXPORT_STATE_FAILED, 1)
    assert failed.failure.reason == error_reason_pb2.ERROR_REASON_INVALID_FIELD
    assert (place.read_text(), str(tmp_path) in failed.failure.message) == ('mine', False)


async def test_a_disk_that_fails_is_tried_again(world: World, tmp_path: Path) -> None:
    """What is of the moment is told as such."""
    place = tmp_path / 'gateway' / 'out' / 'alice'
    place.parent.mkdir(parents=True)
    place.symlink_to(place)
    made = (await world.start(target='file:///a', hub_token='')).export
    waits = await world.until(made.export_id, lambda export: export.HasField('failure'))
    assert waits.state == messages.EXPORT_STATE_WAITING
    assert waits.failure.reason == error_reason_pb2.ERROR_REASON_SERVICE_UNREACHABLE
    place.unlink()
    world.gateway.clock.advance(timedelta(minutes=1))
    assert (await world.until_over(made.export_id)).state == messages.EXPORT_STATE_DONE


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
async def test_what_cannot_be_exported_is_refused(world: World, fields: dict[str, str], reason: str) -> None:
    """Before anything is kept."""
    assert (await failure_of(world.start(**fields))).reason == reason
    listed = await world.stub.ListExports(messages.ListExportsRequest(), metadata=bearer(world.secrets['alice']))
    assert not listed.exports


async def test_a_request_id_is_of_one_export_and_few_wait(tmp_path: Path, checkpoints: Running) -> None:
    """With other content it is refused; so is the seventeenth that is not over, unless it is one of the sixteen."""
    async with exporting(tmp_path / 'gateway', checkpoints, at_once=0) as world:
        for number in range(16):
            await world.start(request_id=f'rq-{number}', target=f'hf://org/name-{number}')
        assert (await failure_of(world.start(request_id='rq-0', target='hf://org/other'))).reason == 'REQUEST_ID_REUSED'
        assert (await failure_of(world.start(request_id='rq-16'))).reason == 'QUOTA_EXCEEDED'
        assert (
            await world.start(request_id='rq-3', target='hf://org/name-3')
        ).export.state == messages.EXPORT_STATE_WAITING
        known = await world.start(request_id='rq-3', target='hf://org/name-3')
        assert (await world.start(request_id='rq-17', target='hf://org/name-3')).export == known.export


async def test_a_push_that_is_under_way_is_not_begun_again(tmp_path: Path, checkpoints: Running) -> None:
    """Also of two that are asked for at once; by another token, to another place or of another state it is another."""
    async with exporting(tmp_path / 'gateway', checkpoints, at_once=0) as world:
        told = await asyncio.gather(*(world.start(request_id=f'rq-{number}') for number in range(4)))
        (export_id,) = {answer.export.export_id for answer in told}
        others: tuple[dict[str, Any], ...] = (
            {'hub_token': 'hf_other'},
            {'target': 'hf://org/other'},
            {'target': 'file:///x', 'hub_token': ''},
            {'is_private': False},
        )
        ids = [
            (await world.start(request_id=f'other-{i}', **fields)).export.export_id for i, fields in enumerate(others)
        ]
        await save(checkpoints, seed=2)
        ids.append((await world.start(request_id='rq-5')).export.export_id)
        assert len({export_id, *ids}) == 1 + len(ids)


async def test_a_push_that_is_over_is_begun_again(world: World, hub: FakeHub) -> None:
    """As another export, of which the hub makes no other commit."""
    made = (await world.start()).export
    await world.until_over(made.export_id)
    again = (await world.start(request_id='rq-2')).export
    assert again.export_id != made.export_id
    assert (await world.until_over(again.export_id)).state == messages.EXPORT_STATE_DONE
    assert hub.commits == 1


async def test_what_is_accepted_and_cancelled_here_is_heard_at_once(
    tmp_path: Path, checkpoints: Running, hub: FakeHub
) -> None:
    """However seldom the database is looked at."""
    hub.delay_seconds = 60
    day = timedelta(days=1)
    async with exporting(tmp_path / 'gateway', checkpoints, poll=day, lease=day) as world:
        made = (await world.start()).export
        await asyncio.to_thread(hub.asked.wait)
        request = messages.CancelExportRequest(export_id=made.export_id)
        await world.stub.CancelExport(request, metadata=bearer(world.secrets['alice']))
        folder = world.state_dir / 'exports'
        while any(folder.iterdir()):
            await world.get(made.export_id)
        hub.delay_seconds = 0
        again = (await world.start(request_id='rq-2', target='file:///x', hub_token='')).export
        assert (await world.until_over(again.export_id)).state == messages.EXPORT_STATE_DONE
