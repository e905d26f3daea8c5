"""Tests of the logs of services that `twinkle up` starts."""

import time
from pathlib import Path

import grpc
import pytest

from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, checkpoint_service_pb2_grpc
from twinkle_client.stack.process_ids import end_process
from twinkle_client.stack.spawning import Spawner

LIMIT_BYTES = 8192
TENANT = (('x-twinkle-tenant', 'alice'),)


@pytest.mark.slow
def test_log_of_a_started_service_is_bounded(tmp_path: Path) -> None:
    """A service that logs many refusals has two bounded log files, even if its state folder has an unusual name."""
    folder = tmp_path / 'state #1: "new"'
    spawner = Spawner(folder, lambda service, event: None)
    settings = {
        'state_dir': str(folder / 'data'),
        'address_file': str(spawner.address_file('checkpoint')),
        'memory_bytes': 0,
        'telemetry': {'log_file_bytes': LIMIT_BYTES},
    }
    spawner.configure('checkpoint', settings)
    spawner.spawn('checkpoint')
    service = spawner.state_of('checkpoint')
    try:
        with grpc.insecure_channel(spawner.wait_for('checkpoint')) as channel:
            _log_refusals(channel, Path(service.log_path))
    finally:
        end_process(service.pid, service.start_mark, grace_seconds=20)
    logs = sorted((folder / 'logs').iterdir())
    assert [log.name for log in logs] == ['checkpoint.log', 'checkpoint.log.old']
    assert all(log.stat().st_size < 2 * LIMIT_BYTES for log in logs)
    assert 'draining' in logs[0].read_text()


def _log_refusals(channel: grpc.Channel, log: Path) -> None:
    """Make the service log more than two files hold; while a file is full, wait until the service empties it."""
    stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)
    request = checkpoint_service_pb2.GetCheckpointRequest(checkpoint_path='twinkle://ad-1/weights/missing')
    for _ in range(5 * LIMIT_BYTES // 100):
        with pytest.raises(grpc.RpcError, match='NOT_FOUND'):
            stub.GetCheckpoint(request, metadata=TENANT)
        while log.stat().st_size > LIMIT_BYTES:
            time.sleep(0)
