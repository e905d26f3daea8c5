"""Weight transports between two threads, in place of processes: transfers, unknown and lost peers, timeouts."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from twinkle.checkpoint_engine import (
    Rendezvous,
    TransferFailed,
    TransportOptions,
    TransportUnavailable,
    WeightTransport,
    load_transport,
)
from twinkle.checkpoint_engine.memory_transports import MemoryTransport
from twinkle.checkpoint_engine.pair_channel import PairChannel, connect_to_peer

OPTIONS = TransportOptions(timeout=timedelta(seconds=60), piece_bytes=1 << 10)
USABLE = {'nccl', 'cuda_ipc'} if torch.cuda.is_available() else set[str]()
IMPATIENT = replace(OPTIONS, timeout=timedelta(seconds=0.5))


class ThreadTransport(MemoryTransport):
    """A memory transport for the threads of one process, which share its buffers."""

    name = 'thread'
    buffers: ClassVar[dict[int, np.ndarray]] = {}

    @classmethod
    def check(cls) -> None:
        """Accept every machine."""

    def expose(self) -> Any:
        self.buffers[id(self)] = np.zeros(self.options.piece_bytes, np.uint8)
        return [id(self)]

    def open(self, description: Any) -> None:
        self._buffer = self.buffers[description[0]]

    def fill(self, piece: np.ndarray) -> None:
        self.buffers[id(self)][: len(piece)] = piece

    def read(self, piece: np.ndarray) -> None:
        piece[:] = self._buffer[: len(piece)]


@pytest.fixture(params=['gloo', 'thread'])
def kind(request: pytest.FixtureRequest) -> type[WeightTransport]:
    """The class of a transport that runs on every machine."""
    return ThreadTransport if request.param == 'thread' else load_transport(request.param)


def send(transport: WeightTransport, rendezvous: Rendezvous, data: bytes) -> None:
    """Send data in pieces, and close the transport."""
    try:
        transport.init_process_group(rendezvous)
        for begin in range(0, len(data), transport.options.piece_bytes):
            transport.send_weights(data[begin : begin + transport.options.piece_bytes])
        transport.finalize()
    finally:
        transport.close()


def receive(transport: WeightTransport, rendezvous: Rendezvous, size_bytes: int) -> bytes:
    """Return the bytes that a receiver gets, and close the transport."""
    data = np.zeros(size_bytes, np.uint8).data
    try:
        transport.init_process_group(rendezvous)
        for begin in range(0, size_bytes, transport.options.piece_bytes):
            transport.receive_weights(data[begin : begin + transport.options.piece_bytes])
        transport.finalize()
    finally:
        transport.close()
    return bytes(data)


def send_and_finalize(transport: WeightTransport, piece: bytes) -> None:
    """Send the last piece, and wait until the receiver has it."""
    transport.send_weights(piece)
    transport.finalize()


def in_thread(function: Callable[..., Any], *args: Any) -> 'Future[Any]':
    """Run one side of a transfer in another thread, and return its future."""
    executor = ThreadPoolExecutor(max_workers=1)
    future = executor.submit(function, *args)
    executor.shutdown(wait=False)
    return future


@pytest.mark.parametrize('size_bytes', [1, 1 << 10, (3 << 10) + 7])
def test_bytes_arrive_unchanged(kind: type[WeightTransport], size_bytes: int) -> None:
    """A state that is smaller than a piece, as large as a piece, or larger arrives bitwise unchanged."""
    data = np.random.default_rng(size_bytes).bytes(size_bytes)
    sender = kind(OPTIONS)
    rendezvous = sender.prepare()
    sending = in_thread(send, sender, rendezvous, data)
    assert receive(kind(OPTIONS), rendezvous, size_bytes) == data
    sending.result()


def test_program_without_the_secret_gets_no_weights(kind: type[WeightTransport]) -> None:
    """A program without the secret gets no weights, and the receiver still gets its transfer."""
    sender = kind(OPTIONS)
    rendezvous = sender.prepare()
    host, _, port = rendezvous.address.rpartition(':')
    sending = in_thread(send, sender, rendezvous, b'weights')
    with pytest.raises(TransferFailed):
        connect_to_peer(rendezvous.address, b'guess' * 6, timeout=timedelta(seconds=60))
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b'\xff' * 100)
    socket.create_connection((host, int(port))).close()
    assert receive(kind(OPTIONS), rendezvous, 7) == b'weights'
    sending.result()


def test_only_one_receiver_is_accepted(kind: type[WeightTransport]) -> None:
    """A second receiver with the secret fails, and the first receiver gets the weights."""
    sender, first = kind(OPTIONS), kind(OPTIONS)
    rendezvous = sender.prepare()
    sending = in_thread(sender.init_process_group, rendezvous)
    first.init_process_group(rendezvous)
    sending.result()
    with pytest.raises(TransferFailed):
        kind(IMPATIENT).init_process_group(rendezvous)
    sending = in_thread(sender.send_weights, b'weights')
    data = np.zeros(7, np.uint8)
    first.receive_weights(data.data)
    sending.result()
    assert data.tobytes() == b'weights'
    first.close()
    sender.close()


@pytest.mark.parametrize('lost_side', ['sender', 'receiver'])
def test_loss_of_the_other_side_in_the_middle_is_an_error(kind: type[WeightTransport], lost_side: str) -> None:
    """If one side ends after the first piece, the other side fails immediately instead of at the timeout."""
    sender, receiver = kind(OPTIONS), kind(OPTIONS)
    rendezvous = sender.prepare()
    sending = in_thread(sender.init_process_group, rendezvous)
    receiver.init_process_group(rendezvous)
    sending.result()
    sending = in_thread(sender.send_weights, b'first')
    receiver.receive_weights(np.zeros(5, np.uint8).data)
    sending.result()
    if lost_side == 'sender':
        sender.close()
        with pytest.raises(TransferFailed):
            receiver.receive_weights(np.zeros(5, np.uint8).data)
    else:
        receiver.close()
        # The first bytes may still fit into an operating system buffer.
        with pytest.raises(TransferFailed):
            send_and_finalize(sender, b'again')
    sender.close()
    receiver.close()


def test_sender_without_a_receiver_fails_after_the_timeout(kind: type[WeightTransport]) -> None:
    """A sender whose receiver never connects fails after the timeout."""
    sender = kind(IMPATIENT)
    with pytest.raises(TransferFailed):
        send(sender, sender.prepare(), b'weights')


def test_waiting_sender_can_be_aborted(kind: type[WeightTransport]) -> None:
    """An abort from another thread ends the wait for a receiver."""
    sender = kind(OPTIONS)
    rendezvous = sender.prepare()
    aborting = threading.Timer(0.2, sender.abort)
    aborting.start()
    with pytest.raises(TransferFailed):
        send(sender, rendezvous, b'weights')
    aborting.join()


@pytest.mark.parametrize('address', ['127.0.0.1:1', 'nowhere', '', '127.0.0.1:99999999', 'host:'])
def test_unreachable_or_malformed_rendezvous_is_an_error(kind: type[WeightTransport], address: str) -> None:
    """A receiver fails if the address is malformed, or if no process listens on the address."""
    with pytest.raises(TransferFailed):
        receive(kind(IMPATIENT), Rendezvous(address, b'secret'), 7)


def test_altered_repeated_and_reordered_messages_are_refused() -> None:
    """A message of the channel is refused if it was changed, repeated or reordered."""
    near, far = socket.socketpair()
    honest = PairChannel(far, b'secret', is_listener=False)
    honest.send(b'one')
    honest.send(b'two')
    first, second = near.recv(39), near.recv(39)
    for messages in ([second], [first, first], [first[:-1] + b'x'], [b'\xff' * 40]):
        left, right = socket.socketpair()
        channel = PairChannel(left, b'secret', is_listener=True)
        right.sendall(b''.join(messages))
        right.close()
        with pytest.raises(TransferFailed):
            [channel.receive() for _ in messages]
        channel.close()
    near.close()
    honest.close()


@pytest.mark.parametrize('name', sorted({'nccl', 'cuda_ipc', 'nixl', 'mooncake'} - USABLE))
def test_missing_transport_is_refused_by_name(name: str) -> None:
    """The error for a transport whose library or device is missing names the transport."""
    with pytest.raises(TransportUnavailable, match=name):
        load_transport(name)
