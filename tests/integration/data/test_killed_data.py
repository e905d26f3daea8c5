"""The processes of a data service end with it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from fixtures.data_process import data_process
from fixtures.data_service import new_request_id
from fixtures.fake_hub import FakeHub, running_hub
from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2

NAME = 'org/chats'


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that delays its responses by ten minutes; temporary files are created in the folder of the test."""
    (tmp_path / 'temporary').mkdir()
    with running_hub(delay_seconds=600.0) as running:
        running.files[NAME], running.is_private[NAME] = {'train.jsonl': b'{"x": 1}\n'}, False
        settings = {'HF_ENDPOINT': running.url, 'HF_HOME': str(tmp_path / 'hf'), 'TMPDIR': str(tmp_path / 'temporary')}
        for name, value in {**settings, 'TWINKLE_HUB_DIR': ''}.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.mark.timeout(300)
async def test_readers_end_with_a_killed_service(hub: FakeHub, tmp_path: Path) -> None:
    """The process that waits for a hub exits after SIGKILL of the service, and its temporary files are deleted."""
    async with data_process(tmp_path / 'state', is_log_read=True) as (service, process):
        request = dataset_service_pb2.CreateDatasetRequest(
            request_id=new_request_id(),
            source=dataset_pb2.DatasetSource(hub=dataset_pb2.HubSource(dataset_id=f'hf://{NAME}')),
            is_streamed=True,
        )
        creating = asyncio.ensure_future(service.datasets.CreateDataset(request, metadata=service.metadata))
        await asyncio.to_thread(hub.asked.wait)
        [reader] = psutil.Process(process.pid).children()
        assert 'twinkle_services.data.backends.hub_process' in reader.cmdline()
        assert [*(tmp_path / 'temporary').iterdir()]
        process.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await creating
        # The reader inherited the log of the service, which reaches its end when no process has it open.
        assert process.stderr is not None
        await asyncio.wait_for(process.stderr.read(), timeout=120)
    assert [*(tmp_path / 'temporary').iterdir()] == []
