"""Transports over a process group of torch that consists of the sender and one receiver.

Each transfer creates a separate group, so a process that already has a default group can use these transports. The
addresses of the members travel over the authenticated channel of the transfer instead of an open key-value store.
"""

from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from twinkle.checkpoint_engine.errors import TransferFailed, TransportUnavailable
from twinkle.checkpoint_engine.pair_channel import PairChannel
from twinkle.checkpoint_engine.transport import GROUP_SIZE, RECEIVER, SENDER, TransportOptions, WeightTransport

_TAG = 0


class _GroupTransport(WeightTransport):
    """A transport that sends pieces with point-to-point operations of a group."""

    name: ClassVar[str]
    device: ClassVar[str]

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        self._group: Any = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def connect(self, channel: PairChannel, rank: int) -> None:
        try:
            self._group = self._make_group(_ChannelStore(channel), rank)
        except (RuntimeError, ValueError) as error:
            raise TransferFailed(f'cannot connect the {self.name} group: {error}') from error

    def send_piece(self, piece: bytes | memoryview) -> None:
        # The memory of a piece may be read-only, which torch does not support.
        buffer = self._buffer_of(len(piece))
        np.copyto(buffer.numpy(), np.frombuffer(piece, np.uint8))
        sent = buffer.to(self.device)
        self._run(lambda group: group.send([sent], RECEIVER, _TAG))

    def receive_piece(self, piece: memoryview) -> None:
        target = torch.from_numpy(np.frombuffer(piece, np.uint8))
        received = target if self.device == 'cpu' else torch.empty_like(target, device=self.device)
        self._run(lambda group: group.recv([received], SENDER, _TAG))
        if received is not target:
            target.copy_(received)

    def close(self) -> None:
        super().close()
        self._group = None

    @abstractmethod
    def _make_group(self, store: Store, rank: int) -> Any:
        """Return a group of both processes, which exchange their addresses through `store`."""

    def _buffer_of(self, size: int) -> torch.Tensor:
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size]

    def _run(self, start: Callable[[Any], Any]) -> None:
        try:
            start(self._group).wait(self.options.timeout)
        except RuntimeError as error:
            raise TransferFailed(f'{self.name}: {error}') from error


class GlooTransport(_GroupTransport):
    """Sends pieces from memory to memory over TCP."""

    name = 'gloo'
    device = 'cpu'

    @classmethod
    def check(cls) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise TransportUnavailable(cls.name, 'this build of torch has no gloo; install another build')

    def _make_group(self, store: Store, rank: int) -> Any:
        gloo = cast('Any', dist.ProcessGroupGloo)
        options = gloo._Options()  # noqa: SLF001 (torch has no public way to make a group from a given store)
        options._devices = [gloo.create_device(hostname=self.options.host)]  # noqa: SLF001
        options._timeout = self.options.timeout  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        return gloo(store, rank, GROUP_SIZE, options)


class NcclTransport(_GroupTransport):
    """Sends pieces from GPU to GPU. Each GPU stores one piece at a time.

    This transport has not been tested, because no machine with two GPUs was available.
    """

    name = 'nccl'
    device = 'cuda'

    @classmethod
    def check(cls) -> None:
        if not torch.cuda.is_available():
            raise TransportUnavailable(cls.name, 'there is no CUDA device; remove the transport from the configuration')
        if not dist.is_available() or not dist.is_nccl_available():
            raise TransportUnavailable(cls.name, 'this build of torch has no NCCL; install another build')

    def _make_group(self, store: Store, rank: int) -> Any:
        nccl = cast('Any', dist).ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = self.options.timeout  # noqa: SLF001 (see GlooTransport)
        return nccl(store, rank, GROUP_SIZE, options)


class _ChannelStore(Store):
    """The key-value store through which torch connects a group. Each process sends the keys that it writes."""

    def __init__(self, channel: PairChannel) -> None:
        super().__init__()
        self._channel = channel
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = content
        self._channel.send(key.encode() + b'\0' + content)

    def get(self, key: str) -> bytes:
        while key not in self._values:
            name, _, content = self._channel.receive().partition(b'\0')
            self._values[name.decode()] = content
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        del timeout  # The channel has a timeout already.
        for key in keys:
            self.get(key)
