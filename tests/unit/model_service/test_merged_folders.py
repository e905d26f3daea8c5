"""Merged models that cannot be written."""

import pytest

from services.model.backends.merged_folders import MergedFolders
from services.model.domain.engine import AdapterState
from services.model.domain.errors import ExportUnavailable
from twinkle.data_format import LoraConfig


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
