"""Create a dataset."""

from dataclasses import dataclass, replace

from services.data.application.ownership import dataset_of
from services.data.application.turns import Turns
from services.data.domain import Dataset, HubSource, MixtureSource, RowSource, Source, Step, Table, UploadSource
from services.data.domain.dataset import new_dataset
from services.data.ports import DatasetStore, RowEngine
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.errors import InvalidField, QuotaExceeded, RequestIdReused, UploadNotFound
from services.kit.ids import new_id
from services.kit.uploads import UploadStore


@dataclass(frozen=True, kw_only=True)
class CreateOrder:
    """What is to be created."""

    request_id: str
    fingerprint: str
    """Digest of the request's content."""
    source: Source
    steps: tuple[Step, ...]
    is_lazy: bool = False
    """See `Table`."""


@dataclass(frozen=True, kw_only=True)
class DatasetLimits:
    """Bounds of what a tenant may keep."""

    rows: int
    """Of one dataset."""
    datasets: int
    """Of one tenant."""


class CreateDataset:
    """Creates datasets."""

    def __init__(
        self, store: DatasetStore, engine: RowEngine, uploads: UploadStore, *, turns: Turns, clock: Clock,
        limits: DatasetLimits,
    ) -> None:  # fmt: skip
        """Create within `limits`, one at a time for each tenant."""
        self._store, self._engine, self._uploads = store, engine, uploads
        self._turns, self._clock, self._limits = turns, clock, limits

    async def __call__(self, caller: Caller, order: CreateOrder) -> Dataset:
        """Return the new dataset, or that of an earlier request with the same id and content.

        Raises:
            ScopeMissing: the key may not.
            RequestIdReused: the request id came before with other content.
            QuotaExceeded, QueueFull: too many datasets, rows, or requests waiting.
            DatasetNotFound, UploadNotFound, HubIdNotFound: a part, upload, hub id or model is not there.
            InvalidField: a row or an argument is wrong.
            DatasetNotReady: a step comes before one it needs.
        """
        require_scope(caller, 'data')
        async with self._turns.of(caller.tenant_id):
            known = self._find_repeat(caller, order)
            if known is not None:
                return known
            table = await self._read(caller, order.source)
            if len(table.rows) > self._limits.rows:
                raise QuotaExceeded('dataset_rows', self._limits.rows)
            table = await self._engine.apply(_as_asked(table, order), order.steps)
            empty = new_dataset(new_id('ds'), tenant_id=caller.tenant_id, create_time=self._clock.now())
            dataset = empty.changed(table, order.steps, (order.request_id, order.fingerprint))
            return await self._store.save(dataset, table)

    def _find_repeat(self, caller: Caller, order: CreateOrder) -> Dataset | None:
        owned = self._store.of_tenant(caller.tenant_id)
        for dataset in owned:
            fingerprint = dataset.fingerprint_of(order.request_id)
            if fingerprint == order.fingerprint:
                return dataset
            if fingerprint is not None:
                raise RequestIdReused(order.request_id)
        if len(owned) >= self._limits.datasets:
            raise QuotaExceeded('datasets', self._limits.datasets)
        return None

    async def _read(self, caller: Caller, source: Source) -> Table:
        match source:
            case RowSource():
                return Table(rows=list(source.rows))
            case HubSource():
                return await self._engine.read_hub(source)
            case UploadSource():
                return await self._read_upload(caller, source)
            case MixtureSource():
                parts = [dataset_of(self._store, caller, dataset_id) for dataset_id in source.dataset_ids]
                tables = [await self._store.load(part) for part in parts]
                return await self._engine.mix(tables, is_interleaved=source.is_interleaved)

    async def _read_upload(self, caller: Caller, source: UploadSource) -> Table:
        upload = await self._uploads.find(caller.tenant_id, source.upload_id)
        if upload is None:
            raise UploadNotFound(source.upload_id)
        if not upload.is_complete:
            stored, size = upload.committed_bytes, upload.header.size_bytes
            problem = f'is not complete: {stored} of {size} bytes are stored; continue the upload'
            raise InvalidField('source.upload.upload_id', problem)
        return await self._engine.read_file(str(upload.path), source.file_format)


def _as_asked(table: Table, order: CreateOrder) -> Table:
    if order.is_lazy and table.is_encoded:
        raise InvalidField('is_lazy', 'must be false: the parts of the mixture are encoded already')
    return replace(table, is_lazy=order.is_lazy)
