"""Tests of merged models: failed writes, and the limit on the number per tenant."""

import shutil

import pytest

from fixtures.journals import make_adapter
from twinkle.data_format import LoraConfig
from twinkle_services.kit.errors import DiskFull, QuotaExceeded
from twinkle_services.model.backends.merged_folders import MergedFolders
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.errors import ExportUnavailable

HUGE_BYTES = 1 << 43
"""8 TiB, more than the free space of a test machine."""
STATE = AdapterState(lora_config=LoraConfig(), adapter={}, full_parameters=())
FIRST, SECOND = (make_adapter(name, tenant_id='alice') for name in ('ad-1', 'ad-2'))
OTHER = make_adapter('ad-3', tenant_id='bob')


async def test_disk_error_of_an_export_is_retryable(tiny_llama_dir, tmp_path):
    """A disk error raises ExportUnavailable, so that the same export can be retried."""
    (tmp_path / 'exports').write_bytes(b'a file where a folder should be')
    folders = MergedFolders(tmp_path / 'exports', base_model=str(tiny_llama_dir), tenant_limit=1)
    try:
        with pytest.raises(ExportUnavailable):
            await folders.export_merged(FIRST, STATE, name='final')
        (tmp_path / 'exports').unlink()
        assert (await folders.export_merged(FIRST, STATE, name='final')).size_bytes > 0
    finally:
        await folders.close()


async def test_export_that_does_not_fit_on_the_disk_is_refused(tiny_llama_dir, tmp_path):
    """A merged model larger than the free space is refused before any write."""
    base = tmp_path / 'base'
    shutil.copytree(tiny_llama_dir, base)
    with (base / 'large.safetensors').open('wb') as file:
        # The file is sparse, so it takes no space.
        file.truncate(HUGE_BYTES)
    folders = MergedFolders(tmp_path / 'exports', base_model=str(base), tenant_limit=1)
    with pytest.raises(DiskFull) as refused:
        await folders.export_merged(FIRST, STATE, name='final')
    assert refused.value.needed_bytes > HUGE_BYTES
    assert not (tmp_path / 'exports').exists()
    await folders.close()


async def test_number_of_merged_models_of_a_tenant_is_limited(tiny_llama_dir, tmp_path):
    """A tenant has at most `tenant_limit` merged models over all its adapters; other tenants are not affected."""
    root = tmp_path / 'exports'
    folders = MergedFolders(root, base_model=str(tiny_llama_dir), tenant_limit=2)
    await folders.export_merged(FIRST, STATE, name='one')
    await folders.export_merged(SECOND, STATE, name='one')
    for adapter in (FIRST, SECOND, make_adapter('ad-4', tenant_id='alice')):
        with pytest.raises(QuotaExceeded) as refused:
            await folders.export_merged(adapter, STATE, name='two')
        assert (refused.value.quota, refused.value.limit) == ('merged_models', 2)
    await folders.export_merged(OTHER, STATE, name='two')
    await folders.close()
    assert sorted(str(path.relative_to(root)) for path in root.glob('*/*') if path.is_dir()) == [
        'ad-1/one',
        'ad-2/one',
        'ad-3/two',
    ]


async def test_a_full_quota_permits_replacing_and_exporting_after_a_deletion(tiny_llama_dir, tmp_path):
    """The limit holds after a restart. Incomplete models count and can be replaced; deleted models do not count."""
    root = tmp_path / 'exports'
    folders = MergedFolders(root, base_model=str(tiny_llama_dir), tenant_limit=1)
    await folders.export_merged(FIRST, STATE, name='one')
    await folders.close()
    # An interrupted export leaves only this folder.
    (root / 'ad-1' / 'one').rename(root / 'ad-1' / '.one.merging')
    folders = MergedFolders(root, base_model=str(tiny_llama_dir), tenant_limit=1)
    with pytest.raises(QuotaExceeded):
        await folders.export_merged(SECOND, STATE, name='two')
    await folders.export_merged(FIRST, STATE, name='one')
    await folders.export_merged(FIRST, STATE, name='one')
    shutil.rmtree(root / 'ad-1' / 'one')
    await folders.export_merged(SECOND, STATE, name='two')
    await folders.close()
