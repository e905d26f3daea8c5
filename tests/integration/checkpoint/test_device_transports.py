"""The service sends states to clients over a device transport, and as bytes after any failure of the transport."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import ValidationError

from fixtures.checkpoint_service import (
    ALICE,
    Running,
    ServiceProcess,
    failure_of,
    make_state,
    publish_and_follow,
    publish_frames,
    serving,
    stream_of,
)
from fixtures.faulty_service import free_port
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import Rendezvous
from twinkle.checkpoint_engine.group_transports import GlooTransport
from twinkle_services.checkpoint.config import CheckpointConfig
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights import Devices, DevicesConfig, DeviceTransfer, Encoding, Segments, open_devices
from twinkle_services.kit.weights.wire import ReceivedState, WeightClient

GLOO = {'names': ['gloo'], 'min_bytes': 1, 'timeout_seconds': 60.0}


def gloo(**fields: Any) -> Devices:
    """Return device transports that contain only gloo."""
    return Devices(DevicesConfig(**{**GLOO, **fields}))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    """A service that offers gloo for states of any size; calls are made for Alice."""
    async with serving(tmp_path, device_transports=GLOO) as running:
        with acting_for(ALICE):
            yield running


STATES = [make_state(seed, size_bytes=1 << 20) for seed in range(3)]


async def test_versions_and_checkpoints_travel_over_gloo(service: Running) -> None:
    """Followed versions, fetched versions and fetched checkpoints are bitwise equal to the published states."""
    client = WeightClient(service.channel, devices=gloo())
    received = await publish_and_follow(client, service.weights, STATES)
    assert [item.state for item in received] == STATES
    assert {item.encoding for item in received} == {Encoding.DEVICE}
    fetched = await client.fetch_version('ad-1', 2)
    assert (fetched.state, fetched.encoding, fetched.header.version.version) == (STATES[1], Encoding.DEVICE, 2)
    await service.weights.save_checkpoint('ad-1', STATES[0], weights_pb2.CheckpointTarget(name='end'))
    saved = await client.fetch_checkpoint('twinkle://ad-1/weights/end')
    assert (saved.state, saved.encoding) == (STATES[0], Encoding.DEVICE)


async def test_transport_is_used_only_if_both_ends_name_it_and_it_pays(tmp_path: Path) -> None:
    """A state is sent as bytes if it is small, or if the service does not have the client's transport."""
    async with serving(tmp_path / 'with', device_transports={**GLOO, 'min_bytes': 2 << 20}) as one:
        with acting_for(ALICE):
            await one.weights.publish_version('ad-1', STATES[0], version=1)
            small = await WeightClient(one.channel, devices=gloo()).fetch_version('ad-1')
    async with serving(tmp_path / 'without') as other:
        with acting_for(ALICE):
            await other.weights.publish_version('ad-1', STATES[0], version=1)
            unknown = await WeightClient(other.channel, devices=gloo()).fetch_version('ad-1')
    assert [(item.state, item.encoding) for item in (small, unknown)] == [(STATES[0], Encoding.WHOLE)] * 2


async def test_segment_is_preferred_to_a_transport(service: Running, tmp_path: Path) -> None:
    """A client on the service's host receives a version in shared memory, although the client also offers gloo."""
    client = WeightClient(service.channel, segments=Segments(tmp_path / 'memory'), devices=gloo())
    await service.weights.publish_version('ad-1', STATES[0], version=1)
    assert (await client.fetch_version('ad-1')).encoding is Encoding.SHARED_MEMORY


class KillingTransport(GlooTransport):
    """Kills the service between the first and the second piece."""

    process_id: ClassVar[int] = 0

    def receive_piece(self, piece: memoryview) -> None:
        super().receive_piece(piece)
        os.kill(self.process_id, signal.SIGKILL)


async def test_version_survives_the_death_of_the_sender_in_the_middle(tmp_path: Path) -> None:
    """A service that is killed between two pieces, and restarted, sends the same version as bytes."""
    settings = (f'listen=127.0.0.1:{free_port()}', 'device_transports.names=[gloo]', 'device_transports.min_bytes=1')
    state = make_state(1, size_bytes=40 << 20)
    service = await ServiceProcess.start(tmp_path, *settings)
    KillingTransport.process_id = service.pid
    devices = Devices(DevicesConfig(**GLOO), load=lambda name: KillingTransport)  # type: ignore[arg-type]
    async with open_channel(service.address) as channel:
        with acting_for(ALICE):
            await WeightClient(channel).publish_version('ad-1', state, version=1)
            client = WeightClient(channel, devices=devices)
            async with aclosing(client.follow('ad-1')) as events:
                following = asyncio.ensure_future(anext(events))
                await service.wait_until_dead()
                restarted = await ServiceProcess.start(tmp_path, *settings)
                event = await following
    await restarted.stop()
    assert isinstance(event, ReceivedState)
    assert (event.state, event.encoding, event.header.version.version) == (state, Encoding.WHOLE, 1)


class SlowTransport(GlooTransport):
    """A transport that waits for the test before it listens, like one that must first resolve its host name."""

    has_begun: ClassVar = threading.Event()
    may_listen: ClassVar = threading.Event()
    addresses: ClassVar[list[str]] = []

    def prepare(self) -> Rendezvous:
        self.has_begun.set()
        assert self.may_listen.wait(60)
        rendezvous = super().prepare()
        self.addresses.append(rendezvous.address)
        return rendezvous


async def test_cancelled_preparation_leaves_no_listener() -> None:
    """If a sender is cancelled while its transport begins to listen, no listener remains."""
    devices = Devices(DevicesConfig(**GLOO), load=lambda name: SlowTransport)
    preparing = asyncio.ensure_future(devices.prepare({'gloo'}, 1))
    assert await asyncio.to_thread(SlowTransport.has_begun.wait, 60)
    preparing.cancel()
    SlowTransport.may_listen.set()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    (address,) = SlowTransport.addresses
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address.split(':'))


class FaultyDevices(Devices):
    """Device transports of a subscriber that make each transfer fail or deliver wrong data."""

    def __init__(self, spoil: Callable[[DeviceTransfer], DeviceTransfer], *, added_bytes: int, damage: int) -> None:
        super().__init__(DevicesConfig(**{**GLOO, 'timeout_seconds': 2.0}))
        self._spoil, self._added_bytes, self._damage = spoil, added_bytes, damage
        self.count = 0

    async def receive(self, transfer: DeviceTransfer, size_bytes: int) -> memoryview:
        """Receive a transfer with the fault applied."""
        self.count += 1
        data = await super().receive(self._spoil(transfer), size_bytes + self._added_bytes)
        changed = np.frombuffer(data, np.uint8).copy()
        changed[len(changed) // 2] ^= self._damage
        return changed.data


def unchanged(transfer: DeviceTransfer) -> DeviceTransfer:
    """Return the transfer that the service announced."""
    return transfer


def pieces_of(size_bytes: int) -> Callable[[DeviceTransfer], DeviceTransfer]:
    """Return a fault: the receiver expects pieces of `size_bytes`."""
    return lambda transfer: DeviceTransfer(transfer.transport, transfer.rendezvous, size_bytes)


def meeting(address: str, secret: bytes | None = None) -> Callable[[DeviceTransfer], DeviceTransfer]:
    """Return a fault: the receiver connects to `address` unless it is empty, and uses `secret` if it is given."""

    def spoil(transfer: DeviceTransfer) -> DeviceTransfer:
        known = transfer.rendezvous
        rendezvous = Rendezvous(address or known.address, secret or known.secret)
        return DeviceTransfer(transfer.transport, rendezvous, transfer.piece_bytes)

    return spoil


FAULTS = {
    'another byte': (unchanged, 0, 1),
    'too many bytes': (unchanged, 64, 0),
    'too few bytes': (unchanged, -64, 0),
    'other pieces': (pieces_of(1000), 0, 0),
    'unreachable': (meeting('127.0.0.1:1'), 0, 0),
    'another secret': (meeting('', b'x' * 32), 0, 0),
    'not offered': (lambda transfer: DeviceTransfer('nccl', transfer.rendezvous, 1), 0, 0),
}


@pytest.mark.parametrize('fault', FAULTS)
async def test_failed_transfer_is_replaced_by_bytes_and_never_tried_again(service: Running, fault: str) -> None:
    """A follower receives the published states after any failure, and the client does not use the transport again."""
    spoil, added_bytes, damage = FAULTS[fault]
    devices = FaultyDevices(spoil, added_bytes=added_bytes, damage=damage)
    client = WeightClient(service.channel, devices=devices)
    received = await publish_and_follow(client, service.weights, STATES)
    assert [item.state for item in received] == STATES
    assert [item.header.version.version for item in received] == [1, 2, 3]
    assert Encoding.DEVICE not in {item.encoding for item in received}
    assert (await client.fetch_version('ad-1', 1)).state == STATES[0]
    assert devices.count == 1


async def test_published_state_over_a_transport_is_refused(service: Running) -> None:
    """A publish whose state has the device encoding fails with UNIMPLEMENTED."""
    messages = publish_frames(STATES[0])
    messages[0].frame.header.encoding = weights_pb2.FRAME_ENCODING_DEVICE
    assert (await failure_of(service.streams.Publish(stream_of(*messages)))).code == 'UNIMPLEMENTED'


def test_unusable_configuration_is_refused_at_the_start(tmp_path: Path) -> None:
    """The error for an unknown transport, or for an unencrypted transport that is not allowed, names the setting."""
    with pytest.raises(ValidationError, match=r'device_transports\.names'):
        CheckpointConfig(state_dir=tmp_path, device_transports={'names': ['mooncake']})  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match=r'device_transports.*is_unencrypted_allowed'):
        open_devices(DevicesConfig(names=('gloo',)), service='checkpoint', is_encrypted=True)
    allowed = DevicesConfig(names=('gloo',), is_unencrypted_allowed=True)
    assert open_devices(allowed, service='checkpoint', is_encrypted=True).names == ('gloo',)
