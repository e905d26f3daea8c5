"""A model service without a gateway, for benchmarks that call it directly."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from twinkle.api.data.v1 import input_feature_pb2
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_config_pb2
from twinkle.api.model.v1.adapter_service_pb2_grpc import AdapterServiceStub
from twinkle_client.model.operations import OperationLog
from twinkle_client.rpc import Connection, new_id
from twinkle_client.rpc.address import Address
from twinkle_client.stack.process_ids import resident_bytes
from twinkle_services.kit.rpc.tensors import tensor_to_proto

_START_LIMIT_SECONDS = 300.0
_POLL_SECONDS = 0.05
_STOP_LIMIT_SECONDS = 60.0


class StandaloneModel:
    """A client of a running model service; every method blocks until the service has finished."""

    def __init__(self, address: str, pid: int, base_model: str, state_dir: Path) -> None:
        self.state_dir = state_dir
        self._pid = pid
        self._base_model = base_model
        self._connection = Connection(Address.parse(address), api_key='')
        self._stub = AdapterServiceStub(self._connection.channel)

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the service's process in bytes."""
        return resident_bytes(self._pid)

    def create(self, *, lora_rank: int, seed: int = 0) -> 'StandaloneAdapter':
        """Create an adapter with AdamW."""
        request = adapter_service_pb2.CreateAdapterRequest(
            request_id=new_id('rq'),
            base_model=self._base_model,
            lora_config=training_config_pb2.LoraConfig(lora_rank=lora_rank, seed=seed),
        )
        adapter = self._connection.loop_thread.run(self._connection.unary(self._stub.CreateAdapter, request)).adapter
        return StandaloneAdapter(self._connection, adapter.adapter_id, adapter.parameter_count)

    def close(self) -> None:
        """Close the connection to the service."""
        self._connection.close()


class StandaloneAdapter:
    """An adapter of a `StandaloneModel`."""

    def __init__(self, connection: Connection, adapter_id: str, parameter_count: int) -> None:
        self.parameter_count = parameter_count
        self._loop = connection.loop_thread
        self._log = OperationLog(connection, adapter_id, last_number=0)

    def forward_backward(self, batch: operation_pb2.Batch) -> None:
        """Compute the gradient of a batch and add it to the accumulated gradient."""
        options = operation_pb2.ForwardOptions(is_logprobs_returned=False)
        self._run(forward_backward=operation_pb2.ForwardBackward(batch=batch, options=options))

    def step(self) -> None:
        """Clip and apply the accumulated gradient."""
        self._run(clip_grad_and_step=operation_pb2.ClipGradAndStep())

    def _run(self, **verb: Any) -> None:
        self._loop.run(self._log.run(**verb))


def random_batch(*, examples: int, length: int, vocabulary: int, seed: int = 0) -> operation_pb2.Batch:
    """Return a batch of random tokens with a label at every position."""
    rng = np.random.default_rng(seed)
    features: list[input_feature_pb2.InputFeature] = []
    for _ in range(examples):
        ids = rng.integers(3, vocabulary, length + 1).astype(np.int32)
        features.append(
            input_feature_pb2.InputFeature(input_ids=tensor_to_proto(ids[:-1]), labels=tensor_to_proto(ids[1:]))
        )
    return operation_pb2.Batch(features=input_feature_pb2.FeatureBatch(features=features))


@contextmanager
def running_model(base_model: str, **settings: object) -> Iterator[StandaloneModel]:
    """Run a model service without a checkpoint service, so that it cannot save or publish; yield a client."""
    with tempfile.TemporaryDirectory(prefix='twinkle-bench-') as folder:
        address_file = Path(folder) / 'address.json'
        fixed = {
            'base_model': base_model,
            'checkpoint_address': '127.0.0.1:1',
            'state_dir': folder,
            'address_file': address_file,
            'thread_count': 1,
        }
        words = [word for name, value in {**fixed, **settings}.items() for word in ('--set', f'{name}={value}')]
        with (Path(folder) / 'log').open('wb') as log:
            process = subprocess.Popen([sys.executable, '-m', 'twinkle_services.model', *words], stdout=log, stderr=log)
        try:
            _wait_for(address_file, process)
            address = json.loads(address_file.read_text())['address']
            model = StandaloneModel(address, process.pid, base_model, Path(folder))
            try:
                yield model
            finally:
                model.close()
        finally:
            process.terminate()
            process.wait(timeout=_STOP_LIMIT_SECONDS)


def _wait_for(address_file: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_LIMIT_SECONDS
    while not address_file.exists():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError(f'the model service did not start:\n{(address_file.parent / "log").read_text()[-2000:]}')
        time.sleep(_POLL_SECONDS)
