"""Merged models that cannot be written."""

import shutil

import pytest

from services.kit.errors import DiskFull
from services.model.backends.merged_folders import MergedFolders
from services.model.domain.engine import AdapterState
from services.model.domain.errors import ExportUnavailable
from twinkle.data_format import LoraConfig

HUGE_BYTES = 1 << 43
"""More than any disk has."""


async def test_disk_error_of_an_export_is_retryable(tiny_llama_dir, tmp_path):
    """A failing disk raises ExportUnavailable, so the same export can be retried."""
    (tmp_path / 'exports').write_bytes(b'a file where a folder should be')
    folders = MergedFolders(tmp_path / 'exports', base_model=str(tiny_llama_dir))
    state = AdapterState(lora_config=LoraConfig(), adapter={}, full_parameters=())
    try:
        with pytest.raises(ExportUnavailable):
            await folders.export_merged('ad-1', state, name='final')
        (tmp_path / 'exports').unlink()
        assert (await folders.export_merged('ad-1', state, name='final')).size_bytes > 0
    finally:
        await folders.close()


async def test_export_that_does_not_fit_on_the_disk_is_refused(tiny_llama_dir, tmp_path):
    """A merged model above the free space is refused before anything is written."""
    base = tmp_path / 'base'
    shutil.copytree(tiny_llama_dir, base)
    with (base / 'large.safetensors').open('wb') as file:
        # A sparse file, which takes no space.
        file.truncate(HUGE_BYTES)
    folders = MergedFolders(tmp_path / 'exports', base_model=str(base))
    state = AdapterState(lora_config=LoraConfig(), adapter={}, full_parameters=())
    with pytest.raises(DiskFull) as refused:
        await folders.export_merged('ad-1', state, name='final')
    assert refused.value.needed_bytes > HUGE_BYTES
    assert not (tmp_path / 'exports').exists()
    await folders.close()
