"""Merged models as folders below the state folder of the service."""

from pathlib import Path

from services.kit.errors import NotBuiltYet
from services.model.domain.result import SaveResult
from services.model.ports import AdapterState


class MergedFolders:
    """Implements `services.model.ports.ModelExporter`."""

    def __init__(self, root: Path, *, base_model: str) -> None:
        """Write below `root`; the base weights are those of `base_model`."""
        self._root = root
        self._base_model = base_model

    async def export_merged(self, adapter_id: str, state: AdapterState, *, name: str) -> SaveResult:
        """Write a merged model; see the port."""
        del adapter_id, state, name
        raise NotBuiltYet('the operation ExportMerged')
