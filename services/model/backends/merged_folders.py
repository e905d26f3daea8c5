"""Merged models as folders below the state folder of the service."""

from pathlib import Path

import structlog

from services.kit.errors import InvalidField
from services.kit.worker import SingleWorker
from services.model.domain.errors import ExportUnavailable
from services.model.domain.result import SaveResult
from services.model.ports import AdapterState
from twinkle.checkpoint_engine import AdapterMismatch, InvalidModelFolder, MergeResult, MergeRunning, export_merged
from twinkle.hub import resolve_model

_log = structlog.get_logger('export')


class MergedFolders:
    """Implements `services.model.ports.ModelExporter`. One merge at a time, beside the training of others."""

    def __init__(self, root: Path, *, base_model: str) -> None:
        """Write below `root`; the base weights are those of `base_model`."""
        self._root = root
        self._base_model = base_model
        self._worker = SingleWorker('export')

    async def export_merged(self, adapter_id: str, state: AdapterState, *, name: str) -> SaveResult:
        """Write a merged model; see the port."""
        folder = self._root / adapter_id / name
        try:
            made = await self._worker.run(self._merge, state, folder)
        except (AdapterMismatch, InvalidModelFolder) as error:
            raise InvalidField('operation.export_merged', f'cannot be done for this base model: {error}') from error
        except (OSError, MergeRunning) as error:
            raise ExportUnavailable(adapter_id) from error
        _log.info('exported', adapter=adapter_id, folder=str(folder), size_bytes=made.size_bytes)
        return SaveResult(checkpoint_path='', size_bytes=made.size_bytes, folder=str(folder))

    def _merge(self, state: AdapterState, folder: Path) -> MergeResult:
        lora_config = state.lora_config if state.full_parameters is None else None
        return export_merged(resolve_model(self._base_model), state.adapter, lora_config, folder)
