"""Tests of a model handle's `upload_to_hub`, with a real gateway and a real checkpoint service."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import make_state, serving
from fixtures.fake_hub import FakeHub, running_hub
from fixtures.running_gateway import running_gateway
from twinkle.api.gateway.v1 import export_service_pb2
from twinkle.checkpoint_engine import read_peft_folder, unpack_state, write_peft_folder
from twinkle_client.checkpoints import CheckpointLibrary
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import NotFoundError, StateError
from twinkle_client.model import MultiLoraTransformersModel

STATE = make_state(1, size_bytes=1 << 16)
TENSORS = unpack_state(STATE.manifest, STATE.data)
Program = Callable[[MultiLoraTransformersModel, CheckpointLibrary, str], Any]


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[Program], Any]]:
    """A function that runs a program with a model handle, the checkpoint library and the path of a checkpoint."""
    config = STATE.manifest.lora_config
    assert config is not None
    write_peft_folder(tmp_path / 'adapter', TENSORS, config, base_model='tiny')
    monkeypatch.delenv('HF_TOKEN', raising=False)
    exports = {'folder': tmp_path / 'out', 'poll': timedelta(milliseconds=20)}
    async with (
        serving(tmp_path / 'checkpoints') as checkpoints,
        running_gateway(
            tmp_path / 'gateway', upstream=checkpoints.address, internal_token='', exports=exports
        ) as gateway,
    ):
        secret = (await gateway.make_key('alice', scopes=(1,))).secret

        def program(act: Program) -> Any:
            with TwinkleClient(f'http://{gateway.address}', secret) as client:
                library = CheckpointLibrary(client=client)
                path = library.upload(tmp_path / 'adapter', 'mine', base_model='tiny').path
                return act(MultiLoraTransformersModel('tiny', client=client), library, path)

        yield lambda act: asyncio.to_thread(program, act)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub on loopback that all processes of the test use in place of the public hub."""
    with running_hub() as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        # The fake hub supports only the older protocol for large files.
        monkeypatch.setenv('HF_HUB_DISABLE_XET', '1')
        yield hub


async def test_synchronous_upload_is_complete_on_return(run: Callable[[Program], Any], tmp_path: Path) -> None:
    """A synchronous upload returns after the export has finished, with the URL of the result."""
    export = await run(lambda model, _, path: model.upload_to_hub(path, 'file:///here', async_upload=False))
    assert export.state == export_service_pb2.EXPORT_STATE_DONE
    assert export.url
    assert read_peft_folder(tmp_path / 'out' / 'alice' / 'here')[0] == TENSORS


async def test_asynchronous_upload_runs_in_the_background(run: Callable[[Program], Any], hub: FakeHub) -> None:
    """An asynchronous upload returns an unfinished export, and its id can be used to wait for the upload."""

    def act(model: MultiLoraTransformersModel, library: CheckpointLibrary, path: str) -> Any:
        export = model.upload_to_hub(path, 'hf://org/name', 'hf_right')
        assert export.state in {export_service_pb2.EXPORT_STATE_WAITING, export_service_pb2.EXPORT_STATE_RUNNING}
        return library.wait_export(export.export_id)

    export = await run(act)
    assert export.state == export_service_pb2.EXPORT_STATE_DONE
    assert 'adapter_model.safetensors' in hub.files['org/name']


async def test_refused_upload_raises_an_error(run: Callable[[Program], Any], hub: FakeHub) -> None:
    """A token that the hub does not accept raises StateError with the reason HUB_REFUSED."""

    def act(model: MultiLoraTransformersModel, _: CheckpointLibrary, path: str) -> str:
        with pytest.raises(StateError) as caught:
            model.upload_to_hub(path, 'hf://org/name', 'hf_wrong', async_upload=False)
        return caught.value.reason

    assert await run(act) == 'HUB_REFUSED'
    assert not hub.files


@pytest.mark.parametrize(
    ('checkpoint', 'target', 'token', 'kind', 'word'),
    [
        ('', 'org/name', 'hf_right', ValueError, 'hub_model_id'),
        ('', 'hf://org/name', None, ValueError, 'hub_token'),
        ('./folder', 'hf://org/name', 'hf_right', ValueError, 'checkpoint_dir'),
        ('final', 'hf://org/name', 'hf_right', KeyError, 'adapter_name'),
        ('', 'ms://org/name', 'ms_right', StateError, 'ModelScope'),
        ('twinkle://nobody/weights/final', 'hf://org/name', 'hf_right', NotFoundError, 'nobody'),
    ],
)
async def test_invalid_upload_is_refused_immediately(
    run: Callable[[Program], Any], checkpoint: str, target: str, token: str | None, kind: type[Exception], word: str
) -> None:
    """The error for an invalid upload names the argument or value, and no export is created."""

    def act(model: MultiLoraTransformersModel, library: CheckpointLibrary, path: str) -> list[Any]:
        with pytest.raises(kind, match=word):
            model.upload_to_hub(checkpoint or path, target, token)
        return library.list_exports()

    assert await run(act) == []
