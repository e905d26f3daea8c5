"""State folders are private to their owner, even if a service starts with a permissive umask."""

import asyncio
import sys
from pathlib import Path

import pytest

from fixtures.tiers import mostly_slow
from fixtures.tiny_model import build_tiny_model

CHECKPOINT = 'checkpoint_address=127.0.0.1:1'
"""Setting with an address at which no server listens. No service calls it at the start."""
SETTINGS = {
    'checkpoint': (),
    'data': (),
    'gateway': ('bootstrap_key=tml-administrator-key', 'http_listen=127.0.0.1:0'),
    'model': (CHECKPOINT, 'base_model={model}'),
    'sampler': (CHECKPOINT, 'base_model={model}', 'engine=torch'),
}


@pytest.fixture(scope='module')
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model."""
    return build_tiny_model(tmp_path_factory.mktemp('model'))


@pytest.mark.parametrize('service', mostly_slow(SETTINGS))
async def test_state_is_readable_by_its_owner_only(service: str, model_dir: Path, tmp_path: Path) -> None:
    """Each service creates only private folders and files, even if it is started with umask 0."""
    state_dir = tmp_path / 'state'
    await _run_until_ready(service, state_dir, *(item.format(model=model_dir) for item in SETTINGS[service]))
    created = [state_dir, *state_dir.rglob('*')]
    assert state_dir / 'address.json' in created
    assert [path for path in created if path.lstat().st_mode & 0o077] == []


async def _run_until_ready(service: str, state_dir: Path, *settings: str) -> None:
    """Start a service with umask 0, and stop it once it serves."""
    settings = (f'state_dir={state_dir}', f'address_file={state_dir}/address.json', *settings)
    arguments = [word for setting in settings for word in ('--set', setting)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, '-m', f'twinkle_services.{service}', *arguments, umask=0
    )
    ended = asyncio.ensure_future(process.wait())
    try:
        while not (state_dir / 'address.json').exists():
            assert not ended.done(), 'the service exited before it wrote its address'
            await asyncio.wait([ended], timeout=0.05)
        process.terminate()
        await ended
    finally:
        if process.returncode is None:
            process.kill()
        await ended
