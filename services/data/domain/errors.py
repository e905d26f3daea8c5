"""Errors that only the data service raises. Shared errors are in `twinkle_services.kit.errors`."""

from collections.abc import Mapping

from twinkle_services.kit.errors import FailedPrecondition, NotFound, Unavailable, domain_error


@domain_error('DATASET_NOT_FOUND', 'no dataset {dataset_id!r}')
class DatasetNotFound(NotFound):
    """The caller has no such dataset."""

    dataset_id: str


@domain_error('LOADER_NOT_FOUND', 'no loader {loader_id!r}')
class LoaderNotFound(NotFound):
    """The caller has no such loader."""

    loader_id: str


@domain_error('DATASET_NOT_READY', '{problem}')
class DatasetNotReady(FailedPrecondition):
    """A required earlier step is missing, or the requested step was already applied."""

    dataset_id: str
    """Id of the dataset; empty while it is being created."""
    needs: str
    """Required step that is missing, such as 'encode'; empty if no step is missing."""
    problem: str

    def metadata(self) -> Mapping[str, str]:
        """Return the dataset id and the missing step, where set; the message contains the problem."""
        known = {'datasetId': self.dataset_id, 'needs': self.needs}
        return {name: value for name, value in known.items() if value}


@domain_error('HUB_ID_NOT_FOUND', '{hub_id!r} is not on any hub, mirror or cache that this service can reach')
class HubIdNotFound(NotFound):
    """A hub id cannot be resolved by this service."""

    hub_id: str


@domain_error(
    'POSITION_NOT_REACHED',
    'loader {loader_id!r} reads its stream up to row {consumed_rows}, and has reached row {reached_rows}; retry later',
)
class PositionNotReached(Unavailable):
    """The stream of a loader is still being read up to the cursor; a repeated call continues to wait for it."""

    loader_id: str
    consumed_rows: int
    """Number of rows before the cursor."""
    reached_rows: int
    """Number of rows that were passed so far."""
