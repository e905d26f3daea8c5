"""Apply steps to a dataset."""

from dataclasses import dataclass

from services.data.application.ownership import dataset_of
from services.data.application.turns import Turns
from services.data.domain import Dataset, Step
from services.data.ports import DatasetStore, LoaderStore, RowEngine
from services.kit.caller import Caller
from services.kit.errors import InUse, RequestIdReused


@dataclass(frozen=True, kw_only=True)
class ApplyOrder:
    """What is to be applied."""

    request_id: str
    fingerprint: str
    """Digest of the request's content."""
    dataset_id: str
    steps: tuple[Step, ...]


class ApplySteps:
    """Changes datasets, by all steps or none."""

    def __init__(self, store: DatasetStore, engine: RowEngine, loaders: LoaderStore, *, turns: Turns) -> None:
        """Change what `store` keeps, one change at a time for each tenant."""
        self._store, self._engine, self._loaders, self._turns = store, engine, loaders, turns

    async def __call__(self, caller: Caller, order: ApplyOrder) -> Dataset:
        """Return the dataset afterwards; a repeated request changes nothing more.

        Raises:
            DatasetNotFound: not the caller's.
            RequestIdReused: the request id came before with other content.
            InUse: a loader reads it.
            QueueFull: too many requests wait.
            InvalidField: a row or an argument is wrong.
            DatasetNotReady: a step comes before one it needs.
            HubIdNotFound: the template's model cannot be had.
        """
        dataset_of(self._store, caller, order.dataset_id)
        async with self._turns.of(caller.tenant_id):
            dataset = dataset_of(self._store, caller, order.dataset_id)
            fingerprint = dataset.fingerprint_of(order.request_id)
            if fingerprint == order.fingerprint:
                return dataset
            if fingerprint is not None:
                raise RequestIdReused(order.request_id)
            refuse_while_read(self._loaders, dataset)
            table = await self._engine.apply(await self._store.load(dataset), order.steps)
            changed = dataset.changed(table, order.steps, (order.request_id, order.fingerprint))
            # A loader may have been opened meanwhile; its batches must stay what they are.
            refuse_while_read(self._loaders, dataset)
            return await self._store.save(changed, table)


def refuse_while_read(loaders: LoaderStore, dataset: Dataset) -> None:
    """Refuse to change what an open loader reads.

    Raises:
        InUse: names the loader.
    """
    for loader in loaders.of_tenant(dataset.tenant_id):
        if loader.dataset_id == dataset.dataset_id:
            raise InUse('dataset', dataset.dataset_id, f'loader {loader.loader_id}')
