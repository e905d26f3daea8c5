"""Downloads of whole models through a gateway with a real checkpoint service. The client merges the weights."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from fixtures.checkpoint_service import serving
from fixtures.running_gateway import running_gateway
from fixtures.tiny_model import HIDDEN, LAYERS, add_merge, build_tiny_model
from fixtures.whole_models import whole_state
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import PackedState, pack_state
from twinkle.data_format import LoraConfig, TensorData
from twinkle_client import TwinkleClient
from twinkle_client.checkpoints import CheckpointLibrary
from twinkle_client.cli import app
from twinkle_client.errors import NotFoundError
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.context import acting_for

MODEL = 'org/tiny'
ADAPTER, WHOLE = 'twinkle://ad-1/weights/best', 'twinkle://ad-1/weights/whole'


def lora_state(seed: int = 0) -> PackedState:
    """Return an adapter of the tiny model's query projections."""
    random = np.random.default_rng(seed)
    tensors = {
        f'base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight': TensorData.from_numpy(
            random.normal(0, 0.2, shape).astype(np.float32)
        )
        for layer in range(LAYERS)
        for part, shape in (('A', (4, HIDDEN)), ('B', (HIDDEN, 4)))
    }
    return pack_state(tensors, base_model=MODEL, lora_config=LoraConfig(r=4, target_modules=('q_proj',)))


@dataclass(frozen=True)
class Deployment:
    """A gateway with two checkpoints, and the base model in the mirror of this machine."""

    url: str
    secret: str
    base: Path

    @asynccontextmanager
    async def client(self) -> AsyncIterator[TwinkleClient]:
        """Open a client; this blocks while the gateway runs in the event loop, so a thread does it."""
        client = await asyncio.to_thread(TwinkleClient, self.url, self.secret)
        yield client
        await asyncio.to_thread(client.close)

    async def download(self, path: str, folder: Path, **options: Any) -> Path:
        """Download a merged model with a new client."""
        async with self.client() as client:
            return await CheckpointLibrary(client=client).download_merged.aio(path, folder, **options)


@pytest.fixture
async def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    """Run a gateway and a checkpoint service with an adapter and a full-parameter checkpoint of one base model."""
    base = build_tiny_model(tmp_path / 'mirror' / 'models' / 'org' / 'tiny')
    monkeypatch.setenv('TWINKLE_HUB_DIR', str(tmp_path / 'mirror'))
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path / 'hf'))
    monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:1')
    async with (
        serving(tmp_path / 'checkpoints') as checkpoints,
        running_gateway(tmp_path / 'gateway', upstream=checkpoints.address, internal_token='') as gateway,
    ):
        with acting_for(Caller(tenant_id='alice', is_internal=True)):
            for name, state in (('best', lora_state()), ('whole', whole_state(base, factor=2.0, base_model=MODEL))):
                await checkpoints.weights.save_checkpoint('ad-1', state, weights_pb2.CheckpointTarget(name=name))
        secret = (await gateway.make_key('alice', scopes=(1,))).secret
        monkeypatch.setenv('TWINKLE_SERVER_URL', f'http://{gateway.address}')
        monkeypatch.setenv('TWINKLE_API_KEY', secret)
        yield Deployment(f'http://{gateway.address}', secret, base)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the model's logits."""
    with torch.no_grad():
        return model(input_ids=ids).logits


async def test_transformers_loads_a_merged_download(deployment: Deployment, tmp_path: Path) -> None:
    """The downloaded folder gives the logits of base model and adapter; it has the tokenizer and no temporary files."""
    folder = tmp_path / 'out' / 'merged'
    finished: list[str] = []

    def note(stage: str, *, done: float, total: float) -> None:
        if done == total:
            finished.append(stage)

    assert await deployment.download(ADAPTER, folder, report=note) == folder
    assert finished == ['downloading the checkpoint', 'merging']
    assert list(folder.parent.iterdir()) == [folder]
    ids = AutoTokenizer.from_pretrained(folder)('hello', return_tensors='pt').input_ids
    async with deployment.client() as client:
        await client.download_checkpoint.aio(ADAPTER, tmp_path / 'adapter')
    base = AutoModelForCausalLM.from_pretrained(deployment.base)
    expected = logits(PeftModel.from_pretrained(base, tmp_path / 'adapter'), ids)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(merged, ids), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(deployment.base), ids), expected, atol=1e-2)


async def test_full_parameter_checkpoint_becomes_a_model_folder(deployment: Deployment, tmp_path: Path) -> None:
    """The weights of a full-parameter checkpoint replace those of the base model, in the requested type."""
    await deployment.download(WHOLE, tmp_path / 'merged', base=deployment.base, dtype='float32')
    base, written = (load_file(folder / 'model.safetensors') for folder in (deployment.base, tmp_path / 'merged'))
    assert base.keys() == written.keys()
    assert all(np.array_equal(written[name], 2 * base[name]) for name in base)


async def test_missing_base_model_is_refused_before_the_download(deployment: Deployment, tmp_path: Path) -> None:
    """A base model that cannot be found, or is not a model, is refused with the option that names its folder."""
    deployment.base.rename(tmp_path / 'moved')
    (tmp_path / 'empty').mkdir()
    for base in ('', tmp_path / 'empty'):
        with pytest.raises(ValueError, match='--base'):
            await deployment.download(ADAPTER, tmp_path / 'out' / 'merged', base=base)
    assert not (tmp_path / 'out').exists()
    await deployment.download(ADAPTER, tmp_path / 'out' / 'merged', base=tmp_path / 'moved')


async def test_invalid_downloads_are_refused(deployment: Deployment, tmp_path: Path) -> None:
    """An unknown type, a missing checkpoint, or a target with other content is refused, and nothing changes."""
    with pytest.raises(ValueError, match='dtype must be one of'):
        await deployment.download(ADAPTER, tmp_path / 'out', dtype='int8')
    with pytest.raises(NotFoundError):
        await deployment.download('twinkle://ad-1/weights/none', tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'work').mkdir()
    (tmp_path / 'work' / 'notes.txt').write_text('mine')
    for target in (tmp_path / 'work', tmp_path / 'work' / 'notes.txt'):
        with pytest.raises(ValueError, match='is not a merged model'):
            await deployment.download(ADAPTER, target)
    assert (tmp_path / 'work' / 'notes.txt').read_text() == 'mine'


async def test_interrupted_merge_is_continued(deployment: Deployment, tmp_path: Path) -> None:
    """A failed merge leaves no folder, and does not affect the weights of the next download."""

    def fail(stage: str, *, done: float, total: float) -> None:
        if stage == 'merging' and done > total / 2:
            raise RuntimeError('stopped')

    folder = tmp_path / 'out' / 'merged'
    with pytest.raises(RuntimeError, match='stopped'):
        await deployment.download(WHOLE, folder, report=fail)
    assert not folder.exists()
    await deployment.download(ADAPTER, folder)
    base, written = (load_file(path / 'model.safetensors') for path in (deployment.base, folder))
    changed = {name for name in base if not np.array_equal(base[name], written[name])}
    assert changed == {f'model.layers.{layer}.self_attn.q_proj.weight' for layer in range(LAYERS)}
    await deployment.download(WHOLE, folder)
    assert list(folder.parent.iterdir()) == [folder]


async def test_cancelled_merge_stops(deployment: Deployment, tmp_path: Path) -> None:
    """A cancelled call stops its thread at the next block and leaves no folder."""
    reached, resume = threading.Event(), threading.Event()

    def wait(stage: str, *, done: float, total: float) -> None:
        if stage == 'merging':
            reached.set()
            resume.wait()

    async with deployment.client() as client:
        library = CheckpointLibrary(client=client)
        task = asyncio.ensure_future(library.download_merged.aio(ADAPTER, tmp_path / 'merged', report=wait))
        await asyncio.to_thread(reached.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The thread of the client ends the cancelled call before it answers the next one.
        await library.list_exports.aio()
        resume.set()
        await library.download_merged.aio(ADAPTER, tmp_path / 'other')
    assert not (tmp_path / 'merged').exists()


async def test_command_writes_a_merged_model(deployment: Deployment, tmp_path: Path) -> None:
    """`twinkle checkpoint download --merged` prints the folder; its options are refused without it."""

    async def run(*arguments: str) -> tuple[int, str, str]:
        result = await asyncio.to_thread(CliRunner().invoke, app, ['checkpoint', 'download', *arguments])
        return result.exit_code, result.stdout, result.stderr

    folder = tmp_path / 'merged'
    merged = await run(ADAPTER, str(folder), '--merged', '--base', str(deployment.base), '--dtype', 'bfloat16')
    # The gateway of this process logs to the same output.
    assert (merged[0], merged[1].splitlines()[-1]) == (0, str(folder))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert (await run(ADAPTER, str(folder), '--base', str(deployment.base)))[0] == 1
    status, _, message = await run(ADAPTER, str(deployment.base), '--merged')
    assert status == 1
    assert 'is not a merged model' in message


async def test_gguf_file_has_the_merged_weights(deployment: Deployment, tmp_path: Path) -> None:
    """`--format gguf` writes one file, which transformers reads with the logits of the merged folder."""
    add_merge(deployment.base)
    folder, file = tmp_path / 'merged', tmp_path / 'out' / 'tiny.gguf'
    await deployment.download(ADAPTER, folder)
    arguments = ['checkpoint', 'download', ADAPTER, str(file), '--format', 'gguf']
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, str(file))
    assert list(file.parent.iterdir()) == [file]
    ids = torch.tensor([[5, 100, 17, 250, 42]])
    expected = logits(AutoModelForCausalLM.from_pretrained(folder), ids)
    found = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    assert torch.allclose(logits(found, ids), expected, rtol=0, atol=1e-4)


async def test_gguf_of_an_unsupported_model_is_refused_before_the_download(
    deployment: Deployment, tmp_path: Path
) -> None:
    """The error for an unusable tokenizer, type or target names it, and no folder is created."""
    file = tmp_path / 'out' / 'tiny.gguf'
    async with deployment.client() as client:
        library = CheckpointLibrary(client=client)
        with pytest.raises(ValueError, match=r'tokenizer\.json: is not a byte-level BPE with merges'):
            await library.download_gguf.aio(ADAPTER, file)
        add_merge(deployment.base)
        with pytest.raises(ValueError, match='dtype must be one of'):
            await library.download_gguf.aio(ADAPTER, file, dtype='q4_k')
        with pytest.raises(ValueError, match='is a folder; name a file'):
            await library.download_gguf.aio(ADAPTER, tmp_path)
    assert not file.parent.exists()
