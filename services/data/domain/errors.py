"""Errors that only the data service raises. The shared ones are in `services.kit.errors`."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.kit.errors import FailedPrecondition, NotFound


@dataclass(eq=False)
class DatasetNotFound(NotFound):
    """No such dataset for this caller."""

    reason = 'DATASET_NOT_FOUND'
    dataset_id: str

    def __str__(self) -> str:
        return f'no dataset {self.dataset_id!r}'


@dataclass(eq=False)
class LoaderNotFound(NotFound):
    """No such loader for this caller."""

    reason = 'LOADER_NOT_FOUND'
    loader_id: str

    def __str__(self) -> str:
        return f'no loader {self.loader_id!r}'


@dataclass(eq=False)
class DatasetNotReady(FailedPrecondition):
    """An earlier step is missing, or has been done already."""

    reason = 'DATASET_NOT_READY'
    dataset_id: str
    """Empty for one that is being created."""
    needs: str
    """The step that is missing, such as 'encode'; empty where another one came too early."""
    problem: str

    def __str__(self) -> str:
        return self.problem

    def metadata(self) -> Mapping[str, str]:
        """Return the dataset and the step; the problem is in the message."""
        known = {'datasetId': self.dataset_id, 'needs': self.needs}
        return {name: value for name, value in known.items() if value}


@dataclass(eq=False)
class HubIdNotFound(NotFound):
    """A hub id resolves to nothing that can be reached."""

    reason = 'HUB_ID_NOT_FOUND'
    hub_id: str

    def __str__(self) -> str:
        return f'{self.hub_id!r} is on no hub, mirror or cache that can be reached from here'
