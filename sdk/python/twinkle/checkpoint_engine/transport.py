"""Transports that move the bytes of a state between two processes, outside the connection that announces the state.

The sender prepares a rendezvous, and sends it to the receiver over a connection that authenticates both. The receiver
connects, the sender sends pieces, and both complete the transfer. The bytes are neither encrypted nor authenticated, so
the receiver must verify the digest of the state. The implementations in `group_transports` and `memory_transports`
import torch; this module does not.
"""

import importlib
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta

from twinkle.checkpoint_engine.errors import TransferFailed, TransportUnavailable
from twinkle.checkpoint_engine.pair_channel import PairChannel, accept_peer, connect_to_peer, new_secret

SENDER, RECEIVER = 0, 1
"""Ranks of the two processes."""
GROUP_SIZE = 2
"""Number of processes of a transfer."""
MAX_PIECE_BYTES = 1 << 30
"""Maximum of `TransportOptions.piece_bytes` that a receiver accepts."""
_CLASSES = {
    'gloo': ('group_transports', 'GlooTransport'),
    'nccl': ('group_transports', 'NcclTransport'),
    'nixl': ('memory_transports', 'NixlTransport'),
    'cuda_ipc': ('memory_transports', 'CudaIpcTransport'),
}
TRANSPORTS = tuple(_CLASSES)
"""Names of all transports."""
_RECEIVED = b'received'


@dataclass(frozen=True)
class Rendezvous:
    """Address and key with which the receiver of one transfer connects to the sender."""

    address: str
    """Address at which the sender listens, `host:port`."""
    secret: bytes = field(repr=False)
    """Key that authenticates the messages of both processes."""


@dataclass(frozen=True)
class TransportOptions:
    """Settings of a transfer."""

    host: str = '127.0.0.1'
    """Name or address of this machine in the network of the transfer; this process listens only there."""
    timeout: timedelta = timedelta(seconds=10)
    """Maximum time to wait for the other process, before the transfer and for each piece."""
    piece_bytes: int = 16 << 20
    """Size of all pieces but the last, equal in both processes."""


class WeightTransport(ABC):
    """One transfer of bytes from a sender to a receiver.

    The sender calls `prepare`. Then both call `init_process_group`, the sender calls `send_weights` for each piece and
    the receiver calls `receive_weights` equally often, and both call `finalize`. Both always call `close` at the end.

    Concurrency: methods block, and one thread at a time may call them. Any thread may call `abort`.

    Raises:
        TransferFailed: `prepare` cannot listen; or, in the methods that transfer data, the other process has ended or
            does not answer.
    """

    def __init__(self, options: TransportOptions) -> None:
        self.options = options
        self._rank = RECEIVER
        self._listener: socket.socket | None = None
        self._secret = b''
        self._channel: PairChannel | None = None

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Check that this machine can use the transport.

        Raises:
            TransportUnavailable: a library or a device is missing.
        """

    def prepare(self) -> Rendezvous:
        """Listen for the receiver, and return the rendezvous to send to it."""
        try:
            self._listener = socket.create_server((self.options.host, 0))
        except OSError as error:
            raise TransferFailed(f'cannot listen on {self.options.host!r}: {error}') from error
        self._rank, self._secret = SENDER, new_secret()
        return Rendezvous(f'{self.options.host}:{self._listener.getsockname()[1]}', self._secret)

    def init_process_group(self, rendezvous: Rendezvous) -> None:
        """Connect to the other process. The sender accepts one receiver: the first that has the secret."""
        timeout = self.options.timeout
        if self._listener is not None:
            self._channel = accept_peer(self._listener, rendezvous.secret, timeout=timeout)
        else:
            self._channel = connect_to_peer(rendezvous.address, rendezvous.secret, timeout=timeout)
        self.connect(self._channel, self._rank)

    def send_weights(self, piece: bytes | memoryview) -> None:
        """Send the next piece."""
        # Both sides must agree on the size first, because gloo ends the process if a message does not fit its buffer.
        self.connected.send(_announcement(piece))
        self.send_piece(piece)

    def receive_weights(self, piece: memoryview) -> None:
        """Fill `piece`, which is writable, with the next bytes. Its size must equal the size of the sent piece."""
        self.connected.expect(_announcement(piece))
        self.receive_piece(piece)

    def finalize(self) -> None:
        """Wait until the receiver has all bytes. The sender may release the state afterwards."""
        if self._rank == RECEIVER:
            self.connected.send(_RECEIVED)
        else:
            self.connected.expect(_RECEIVED)

    def abort(self) -> None:
        """Make the methods that wait for the other process fail soon, at the latest after the timeout."""
        # Closing a socket does not wake up threads that wait for it.
        if self._listener is not None:
            _shut_down(self._listener)
        if self._channel is not None:
            self._channel.abort()

    def close(self) -> None:
        """Disconnect and release all memory. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        if self._channel is not None:
            self._channel.close()

    @property
    def connected(self) -> PairChannel:
        """Channel to the other process.

        Raises:
            TransferFailed: `init_process_group` has not connected the processes.
        """
        if self._channel is None:
            raise TransferFailed('the processes are not connected; call init_process_group first')
        return self._channel

    @abstractmethod
    def connect(self, channel: PairChannel, rank: int) -> None:
        """Connect to the process at the other end of `channel`. Called by `init_process_group`."""

    @abstractmethod
    def send_piece(self, piece: bytes | memoryview) -> None:
        """Send a piece to a receiver that expects its size. Called by `send_weights`."""

    @abstractmethod
    def receive_piece(self, piece: memoryview) -> None:
        """Fill `piece` with the bytes of the next piece, which has the same size. Called by `receive_weights`."""


def _announcement(piece: bytes | memoryview) -> bytes:
    return f'{len(piece)} bytes'.encode()


def load_transport(name: str) -> type[WeightTransport]:
    """Return the class of a transport.

    Raises:
        TransportUnavailable: the name is unknown, or this machine lacks the library or device.
    """
    if name not in _CLASSES:
        raise TransportUnavailable(name, f'the name is unknown; use one of {", ".join(TRANSPORTS)}')
    module, class_name = _CLASSES[name]
    try:
        found: type[WeightTransport] = getattr(importlib.import_module(f'{__package__}.{module}'), class_name)
    except ImportError as error:
        raise TransportUnavailable(name, f'{error}; install torch') from error
    found.check()
    return found


def _shut_down(listener: socket.socket) -> None:
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # The listener is already closed.
