"""Transports in which the receiver reads a buffer of the sender piece by piece.

The sender describes its buffer over the channel of the transfer, fills it, and waits until the receiver has read it.
"""

import importlib
import json
import time
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch

from twinkle.checkpoint_engine.errors import TransferFailed, TransportUnavailable
from twinkle.checkpoint_engine.pair_channel import PairChannel
from twinkle.checkpoint_engine.transport import SENDER, WeightTransport

_FILLED, _READ = b'filled', b'read'
_POLL_SECONDS = 0.0002
_cuda: Any = torch.cuda
_storages: Any = torch.UntypedStorage


class MemoryTransport(WeightTransport):
    """A transport over memory that the receiver can read. Subclasses allocate the buffer and read it."""

    name: ClassVar[str]

    def connect(self, channel: PairChannel, rank: int) -> None:
        try:
            if rank == SENDER:
                channel.send(json.dumps(self.expose()).encode())
            else:
                self.open(json.loads(channel.receive()))
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise TransferFailed(f'{self.name}: {error}') from error

    def send_piece(self, piece: bytes | memoryview) -> None:
        self.fill(np.frombuffer(piece, np.uint8))
        self.connected.send(_FILLED)
        self.connected.expect(_READ)

    def receive_piece(self, piece: memoryview) -> None:
        self.connected.expect(_FILLED)
        self.read(np.frombuffer(piece, np.uint8))
        self.connected.send(_READ)

    @abstractmethod
    def expose(self) -> Any:
        """Allocate the sender's buffer of `piece_bytes`, and return its description as JSON values."""

    @abstractmethod
    def open(self, description: Any) -> None:
        """Open the sender's buffer in the receiver."""

    @abstractmethod
    def fill(self, piece: np.ndarray) -> None:
        """Copy a piece to the start of the sender's buffer. The receiver may read it as soon as this method returns."""

    @abstractmethod
    def read(self, piece: np.ndarray) -> None:
        """Copy the start of the sender's buffer to `piece`."""


class CudaIpcTransport(MemoryTransport):
    """The receiver maps a buffer in the sender's GPU memory. Both processes must see the same GPU.

    This transport has not been tested, because no GPU was available.
    """

    name = 'cuda_ipc'

    @classmethod
    def check(cls) -> None:
        if not torch.cuda.is_available():
            raise TransportUnavailable(cls.name, 'there is no CUDA device; remove the transport from the configuration')

    def expose(self) -> Any:
        self._buffer = torch.empty(self.options.piece_bytes, dtype=torch.uint8, device='cuda')
        # torch.multiprocessing shares tensors through the same two storage methods.
        storage: Any = self._buffer.untyped_storage()
        handle = storage._share_cuda_()
        gpu = _cuda.get_device_properties(self._buffer.device).uuid
        return [str(gpu), [value.hex() if isinstance(value, bytes) else value for value in handle[1:]]]

    def open(self, description: Any) -> None:
        gpu, (memory, size, offset, counter, counter_offset, event, is_synced) = description
        count = torch.cuda.device_count()
        found = [index for index in range(count) if str(_cuda.get_device_properties(index).uuid) == gpu]
        if not found:
            raise TransferFailed(f'the GPU {gpu} of the sender is not visible to this process')
        storage = _storages._new_shared_cuda(  # noqa: SLF001 (see `expose`)
            found[0],
            bytes.fromhex(memory),
            size,
            offset,
            bytes.fromhex(counter),
            counter_offset,
            bytes.fromhex(event),
            is_synced,
        )
        self._buffer = torch.empty(0, dtype=torch.uint8, device=f'cuda:{found[0]}').set_(storage)

    def fill(self, piece: np.ndarray) -> None:
        # The receiver's CUDA stream does not wait for the sender's.
        self._buffer[: len(piece)].copy_(torch.from_numpy(piece.copy()))
        torch.cuda.synchronize(self._buffer.device)

    def read(self, piece: np.ndarray) -> None:
        torch.from_numpy(piece).copy_(self._buffer[: len(piece)])


class NixlTransport(MemoryTransport):
    """The receiver reads a buffer in the sender's memory with NIXL, over RDMA if both machines support it.

    This transport has not been tested; it follows the documentation of NIXL's Python API.
    """

    name = 'nixl'

    @classmethod
    def check(cls) -> None:
        try:
            importlib.import_module('nixl._api')
        except ImportError as error:
            problem = f'{error}; install nixl, or remove the transport from the configuration'
            raise TransportUnavailable(cls.name, problem) from error

    def expose(self) -> Any:
        agent = self._register('sender')
        return [agent.get_agent_metadata().hex(), self._buffer.ctypes.data]

    def open(self, description: Any) -> None:
        metadata, self._address = bytes.fromhex(description[0]), int(description[1])
        agent = self._register('receiver')
        name = agent.add_remote_agent(metadata)
        self._sender = name.decode() if isinstance(name, bytes) else name

    def fill(self, piece: np.ndarray) -> None:
        self._buffer[: len(piece)] = piece

    def read(self, piece: np.ndarray) -> None:
        agent = self._agent
        local = agent.get_xfer_descs([(self._buffer.ctypes.data, len(piece), 0)], mem_type='DRAM')
        remote = agent.get_xfer_descs([(self._address, len(piece), 0)], mem_type='DRAM')
        handle = agent.initialize_xfer('READ', local, remote, self._sender, b'')
        deadline = time.monotonic() + self.options.timeout.total_seconds()
        state = agent.transfer(handle)
        while state == 'PROC' and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != 'DONE':
            raise TransferFailed(f'NIXL did not finish reading a piece; its state is {state}')
        piece[:] = self._buffer[: len(piece)]

    def close(self) -> None:
        super().close()
        registered, self._registered = getattr(self, '_registered', None), None
        if registered is not None:
            self._agent.deregister_memory(registered)

    def _register(self, name: str) -> Any:
        """Create an agent with a unique name, register a buffer of one piece with it, and return the agent."""
        nixl: Any = importlib.import_module('nixl._api')
        self._buffer = np.empty(self.options.piece_bytes, np.uint8)
        self._agent = nixl.nixl_agent(f'twinkle-{name}-{id(self):x}-{time.monotonic_ns():x}')
        self._registered = self._agent.register_memory(
            [(self._buffer.ctypes.data, self._buffer.nbytes, 0, '')], mem_type='DRAM'
        )
        return self._agent
