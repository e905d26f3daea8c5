"""Writes merged models below the state folder of the service."""

import asyncio
from pathlib import Path

from services.kit.disk_space import check_free_space
from services.kit.errors import InvalidField
from services.kit.worker import SingleWorker
from services.model.domain.engine import AdapterState
from services.model.domain.errors import ExportUnavailable
from services.model.domain.result import SaveResult
from twinkle.checkpoint_engine import AdapterMismatch, InvalidModelFolder, MergeResult, MergeRunning, export_merged
from twinkle.hub import resolve_model


class MergedFolders:
    """Implements `services.model.ports.ModelExporter`; writes to `<root>/<adapter>/<name>`.

    Concurrency: one merge runs at a time, in a separate thread, while training continues.
    """

    def __init__(self, root: Path, *, base_model: str) -> None:
        """Create an exporter that merges adapters into `base_model`."""
        self._root = root
        self._base_model = base_model
        self._worker = SingleWorker('merge')

    async def export_merged(self, adapter_id: str, state: AdapterState, *, name: str) -> SaveResult:
        try:
            merged = await self._worker.run(self._export, state, self._root / adapter_id / name)
        except (AdapterMismatch, InvalidModelFolder) as error:
            raise InvalidField('operation.export_merged', str(error)) from error
        except (MergeRunning, OSError) as error:
            raise ExportUnavailable(adapter_id) from error
        # Results contain no paths of the server.
        folder = merged.folder.relative_to(self._root.parent)
        return SaveResult(checkpoint_path='', size_bytes=merged.size_bytes, folder=str(folder))

    async def close(self) -> None:
        """Wait for the running merge and stop the thread."""
        await asyncio.to_thread(self._worker.close)

    def _export(self, state: AdapterState, folder: Path) -> MergeResult:
        base = resolve_model(self._base_model)
        # The merged weights have the size of the base model's, and an earlier export remains until they are complete.
        check_free_space(folder, sum(path.stat().st_size for path in Path(base).glob('*.safetensors')))
        config = None if state.full_parameters is not None else state.lora_config
        return export_merged(base, state.adapter, config, folder)
