"""Errors that only the data service raises. The shared ones are in `services.kit.errors`."""

from dataclasses import dataclass

from services.kit.errors import FailedPrecondition, NotFound


@dataclass(eq=False)
class DatasetNotFound(NotFound):
    """No such dataset for this caller, or on the hub."""

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
    problem: str

    def __str__(self) -> str:
        return self.problem
