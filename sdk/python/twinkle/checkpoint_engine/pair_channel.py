"""Small messages between the two processes of a transfer, authenticated with a secret that both have.

A message is sent as its length (4 bytes, little-endian), a tag and its content. The tag is HMAC-SHA256 of the sender's
side, the number of the message and its content. A forged, altered, repeated or reordered message ends the transfer with
an error. Messages are not encrypted.
"""

import hashlib
import hmac
import secrets
import socket
import time
from datetime import timedelta

from twinkle.checkpoint_engine.errors import TransferFailed

_TAG_BYTES = 32
_MAX_MESSAGE_BYTES = 1 << 20
_GREETING = b'twinkle weights 1'
_GREETING_SECONDS = 2.0
"""Maximum time for the first message of a connection. A silent connection delays others by at most this time."""


def new_secret() -> bytes:
    """Return a random secret for one transfer."""
    return secrets.token_bytes(32)


class PairChannel:
    """A connection to the other process.

    Raises:
        TransferFailed: raised by `send`, `receive` and `expect` if the connection is lost, a message is not authentic,
            or the other process does not answer in time.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, is_listener: bool) -> None:
        """Wrap a connection that has a timeout. `is_listener` must be true on exactly one side."""
        self._connection = connection
        self._secret = secret
        self._sides = (b'L', b'C') if is_listener else (b'C', b'L')
        self._sent_count = self._received_count = 0

    def send(self, message: bytes) -> None:
        """Send a message of at most 1 MiB."""
        tag = self._tag(self._sides[0], self._sent_count, message)
        self._sent_count += 1
        try:
            self._connection.sendall(len(message).to_bytes(4, 'little') + tag + message)
        except OSError as error:
            raise TransferFailed(f'the other process has disconnected: {error}') from error

    def receive(self) -> bytes:
        """Return the next message."""
        size = int.from_bytes(self._read(4), 'little')
        if size > _MAX_MESSAGE_BYTES:
            raise TransferFailed(f'a message of {size} bytes is too large')
        tag, message = self._read(_TAG_BYTES), self._read(size)
        if not hmac.compare_digest(tag, self._tag(self._sides[1], self._received_count, message)):
            raise TransferFailed('a message is not from the other process of this transfer')
        self._received_count += 1
        return message

    def expect(self, message: bytes) -> None:
        """Receive a message that must equal `message`."""
        if self.receive() != message:
            raise TransferFailed('received an unexpected message from the other process')

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the maximum time for each part of a message."""
        self._connection.settimeout(timeout.total_seconds())

    def abort(self) -> None:
        """Make pending calls of other threads fail. Any thread may call this method."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The connection is already closed.

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._connection.close()

    def _tag(self, side: bytes, number: int, message: bytes) -> bytes:
        return hmac.digest(self._secret, side + number.to_bytes(8, 'little') + message, hashlib.sha256)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._connection.recv(size - len(data))
            except OSError as error:
                raise TransferFailed(f'the other process does not answer: {error}') from error
            if not part:
                raise TransferFailed('the other process has disconnected')
            data += part
        return bytes(data)


def accept_peer(listener: socket.socket, secret: bytes, *, timeout: timedelta) -> PairChannel:
    """Return a channel to the first process that connects and has `secret`; disconnect other processes.

    Raises:
        TransferFailed: no such process has connected in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while (left := deadline - time.monotonic()) > 0:
        try:
            listener.settimeout(left)
            connection, _ = listener.accept()
        except OSError as error:
            raise TransferFailed(f'the receiver has not connected: {error}') from error
        connection.settimeout(min(left, _GREETING_SECONDS))
        channel = PairChannel(connection, secret, is_listener=True)
        try:
            channel.expect(_GREETING)
            channel.send(_GREETING)
        except TransferFailed:
            channel.close()
            continue
        channel.set_timeout(timeout)
        return channel
    raise TransferFailed('the receiver has not connected in time')


def connect_to_peer(address: str, secret: bytes, *, timeout: timedelta) -> PairChannel:
    """Return a channel to the process that listens on `address`, which must have `secret`.

    Raises:
        TransferFailed: the address is malformed or cannot be reached, or another program listens there.
    """
    host, _, port = address.rpartition(':')
    try:
        connection = socket.create_connection((host, int(port)), timeout=timeout.total_seconds())
    except (OSError, ValueError, OverflowError) as error:
        raise TransferFailed(f'the sender at {address!r} cannot be reached: {error}') from error
    channel = PairChannel(connection, secret, is_listener=False)
    try:
        channel.send(_GREETING)
        channel.expect(_GREETING)
    except TransferFailed:
        channel.close()
        raise
    return channel
