"""If a service cannot load its model, the last line of its error output states the cause, without a traceback."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from fixtures.tiny_model import build_tiny_model

MODEL_FOLDERS = {
    'missing': 'is not a folder with config.json',
    'without weights': 'is not a folder with config.json and all',
    'unknown architecture': 'rwkv',
    'not supported by vLLM': "vLLM cannot run this model, but 'engine: torch' may support it: Model architectures",
}
"""Words of the error message, by the state of the model's folder."""


def _make_folder(path: Path, state: str) -> None:
    if state == 'missing':
        return
    build_tiny_model(path)
    config = json.loads((path / 'config.json').read_bytes())
    if state == 'without weights':
        for weights in path.glob('*.safetensors'):
            weights.unlink()
    elif state == 'not supported by vLLM':
        (path / 'config.json').write_text(json.dumps({**config, 'architectures': ['MadeUpForCausalLM']}))
    else:
        changes = {'model_type': 'rwkv', 'architectures': ['RwkvForCausalLM']}
        (path / 'config.json').write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ('service', 'settings', 'state'),
    [
        pytest.param('model', (), 'unknown architecture', marks=pytest.mark.slow),
        ('sampler', ('engine=torch',), 'missing'),
        pytest.param('sampler', ('engine=vllm',), 'not supported by vLLM', marks=pytest.mark.slow),
        pytest.param('model', (), 'missing', marks=pytest.mark.slow),
        pytest.param('model', (), 'without weights', marks=pytest.mark.slow),
        pytest.param('sampler', ('engine=torch',), 'unknown architecture', marks=pytest.mark.slow),
    ],
)
async def test_unusable_model_is_reported_in_one_line(service, settings, state, tmp_path) -> None:
    """A service whose model is unusable exits with status 1, and the last line of its error output states the cause."""
    _make_folder(tmp_path / 'model', state)
    settings = (
        f'state_dir={tmp_path / "state"}',
        f'base_model={tmp_path / "model"}',
        'checkpoint_address=127.0.0.1:1',
        *settings,
    )
    arguments = [word for setting in settings for word in ('--set', setting)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, '-m', f'twinkle_services.{service}', *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    lines = errors.decode().splitlines()
    assert (process.returncode, 'Traceback' in errors.decode()) == (1, False), errors.decode()
    assert lines[-1].startswith(f'twinkle-{service}: cannot load the model: ')
    assert MODEL_FOLDERS[state] in lines[-1]
