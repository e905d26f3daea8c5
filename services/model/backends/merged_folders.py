"""Writes merged models below the state folder of the service."""

import asyncio
from pathlib import Path

from twinkle.checkpoint_engine import AdapterMismatch, InvalidModelFolder, MergeResult, MergeRunning, export_merged
from twinkle.hub import HubError, resolve_model
from twinkle_services.kit.disk_space import check_free_space
from twinkle_services.kit.errors import InvalidField, QuotaExceeded
from twinkle_services.kit.worker import SingleWorker
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.errors import ExportUnavailable
from twinkle_services.model.domain.result import SaveResult

_OWNER_FILE = '.tenant'
"""File with the id of the tenant, in the folder of an adapter. The folder remains when the adapter is deleted."""


class MergedFolders:
    """Implements `twinkle_services.model.ports.ModelExporter`; writes to `<root>/<adapter>/<name>`.

    Args:
        root: Folder of all merged models.
        base_model: Model that adapters are merged into.
        tenant_limit: Maximum number of merged models of one tenant.

    Concurrency: one merge runs at a time, in a separate thread, while training continues.
    """

    def __init__(self, root: Path, *, base_model: str, tenant_limit: int) -> None:
        self._root = root
        self._base_model = base_model
        self._tenant_limit = tenant_limit
        self._worker = SingleWorker('merge')

    async def export_merged(self, adapter: Adapter, state: AdapterState, *, name: str) -> SaveResult:
        folder = self._root / adapter.adapter_id / name
        try:
            merged = await self._worker.run(self._export, adapter.tenant_id, state, folder)
        except (AdapterMismatch, InvalidModelFolder) as error:
            raise InvalidField('operation.export_merged', str(error)) from error
        except (MergeRunning, HubError, OSError) as error:
            raise ExportUnavailable(adapter.adapter_id) from error
        # Results contain no absolute paths of the server.
        folder = merged.folder.relative_to(self._root.parent)
        return SaveResult(checkpoint_path='', size_bytes=merged.size_bytes, folder=str(folder))

    async def close(self) -> None:
        """Wait for the running merge and stop the thread."""
        await asyncio.to_thread(self._worker.close)

    def _export(self, tenant_id: str, state: AdapterState, folder: Path) -> MergeResult:
        base = resolve_model(self._base_model)
        if self._count_others(tenant_id, folder) >= self._tenant_limit:
            raise QuotaExceeded('merged_models', self._tenant_limit)
        # The merged weights are as large as the base model, and an earlier export is removed only after the merge.
        check_free_space(folder, sum(path.stat().st_size for path in Path(base).glob('*.safetensors')))
        folder.parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / _OWNER_FILE).write_text(tenant_id)
        config = None if state.full_parameters is not None else state.lora_config
        return export_merged(base, state.adapter, config, folder)

    def _count_others(self, tenant_id: str, folder: Path) -> int:
        """Count the tenant's merged models and incomplete ones, except those that an export to `folder` replaces."""
        owned = [owner.parent for owner in self._root.glob(f'*/{_OWNER_FILE}') if owner.read_text() == tenant_id]
        replaced = {folder, folder.with_name(f'.{folder.name}.merging')}
        return sum(item.is_dir() and item not in replaced for parent in owned for item in parent.iterdir())
