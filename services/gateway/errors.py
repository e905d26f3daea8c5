"""Errors that only the gateway raises. What it shares with other services is in `services.kit.errors`."""

from dataclasses import dataclass

from services.kit.errors import AlreadyExists, DataLoss, FailedPrecondition, NotFound, ServiceUnreachable, Unavailable


@dataclass(eq=False)
class SessionNotFound(NotFound):
    """No such session for this caller."""

    reason = 'SESSION_NOT_FOUND'
    session_id: str

    def __str__(self) -> str:
        return f'no session {self.session_id!r}'


@dataclass(eq=False)
class SessionFinished(FailedPrecondition):
    """The session's client said that it was done."""

    reason = 'SESSION_FINISHED'
    session_id: str

    def __str__(self) -> str:
        return f'session {self.session_id!r} is finished; create another one'


@dataclass(eq=False)
class RunNotFound(NotFound):
    """No such run for this caller."""

    reason = 'RUN_NOT_FOUND'
    run_id: str

    def __str__(self) -> str:
        return f'no run {self.run_id!r}'


@dataclass(eq=False)
class KeyNotFound(NotFound):
    """No such API key."""

    reason = 'KEY_NOT_FOUND'
    key_id: str

    def __str__(self) -> str:
        return f'no API key {self.key_id!r}'


@dataclass(eq=False)
class KeyEnded(FailedPrecondition):
    """The key is revoked or expired, so that there is nothing to replace."""

    reason = 'KEY_ENDED'
    key_id: str

    def __str__(self) -> str:
        return f'API key {self.key_id!r} has ended; create another one'


@dataclass(eq=False)
class ProjectNotFound(NotFound):
    """The tenant has no such project."""

    reason = 'PROJECT_NOT_FOUND'
    project_id: str

    def __str__(self) -> str:
        return f'no project {self.project_id!r}; an administrator makes projects: twinkle projects create'


@dataclass(eq=False)
class TenantNotFound(NotFound):
    """No such tenant."""

    reason = 'TENANT_NOT_FOUND'
    tenant_id: str

    def __str__(self) -> str:
        return f'no tenant {self.tenant_id!r}'


@dataclass(eq=False)
class ReplicaNotFound(NotFound):
    """No such replica in the fleet, or its lease has ended."""

    reason = 'REPLICA_NOT_FOUND'
    replica_id: str

    def __str__(self) -> str:
        return f'no replica {self.replica_id!r} in the fleet'


@dataclass(eq=False)
class NoReplica(Unavailable):
    """No replica of the fleet can serve this now."""

    reason = 'NO_REPLICA'
    service: str
    base_model: str = ''

    def __str__(self) -> str:
        of = f' of {self.base_model!r}' if self.base_model else ''
        return f'no {self.service}{of} is in the fleet now; try again, or see `twinkle fleet`'


@dataclass(eq=False)
class SamplingNotFound(NotFound):
    """The caller has no such sampling request running."""

    reason = 'REQUEST_NOT_FOUND'
    request_id: str

    def __str__(self) -> str:
        return f'no request {self.request_id!r} is running'


@dataclass(eq=False)
class AdapterIdTaken(AlreadyExists):
    """The caller used the id for an adapter of another base model."""

    reason = 'ID_TAKEN'
    id: str
    kind: str = 'adapter'

    def __str__(self) -> str:
        return f'adapter_id {self.id!r} was used before, with another base model; choose another, or leave it empty'


@dataclass(eq=False)
class SamplingIdTaken(AlreadyExists):
    """The caller has a sampling request of that id running."""

    reason = 'ID_TAKEN'
    id: str
    kind: str = 'request'

    def __str__(self) -> str:
        return f'request_id {self.id!r} is running already; choose another or leave it empty'


class CheckpointStreamLost(ServiceUnreachable):
    """A sampler was lost in the middle of a stream that another one may not go on with."""

    def __str__(self) -> str:
        return (
            'the sampler was lost, and a stream of a checkpoint path goes on at no other one, since the path may name '
            'other weights by now; ask again, or name the adapter and its version'
        )


@dataclass(eq=False)
class BaseModelsUnreachable(ServiceUnreachable):
    """What is asked of all model services cannot be told, since those of some base models cannot be reached."""

    base_models: str
    """Their names, sorted, with commas between them; empty where a service never said what it holds."""

    def __str__(self) -> str:
        of = self.base_models or 'a base model that is not known yet'
        return f'the model service of {of} cannot be reached at the moment; what it has is missing, so try again'


class ReplicaNotReached(ServiceUnreachable):
    """The connection to a replica could not be made: it never had the request."""


@dataclass(eq=False)
class FutureNotFound(NotFound):
    """No such future for this caller."""

    reason = 'FUTURE_NOT_FOUND'
    future_id: str

    def __str__(self) -> str:
        return f'no future {self.future_id!r}'


@dataclass(eq=False)
class FutureExpired(NotFound):
    """The future's outcome is no longer kept."""

    reason = 'FUTURE_EXPIRED'
    future_id: str

    def __str__(self) -> str:
        return f'the outcome of future {self.future_id!r} is no longer kept'


@dataclass(eq=False)
class PositionMissing(FailedPrecondition):
    """The future waited for an earlier position of its lane that never came."""

    reason = 'POSITION_MISSING'
    lane: str
    position: int
    missing: int

    def __str__(self) -> str:
        return f'position {self.missing} of {self.lane!r} never came; position {self.position} waited for it'


@dataclass(eq=False)
class PositionPassed(FailedPrecondition):
    """The future came after its lane had gone on."""

    reason = 'POSITION_PASSED'
    lane: str
    position: int

    def __str__(self) -> str:
        return f'position {self.position} of {self.lane!r} came too late: another request had it, or it was given up'


@dataclass(eq=False)
class PayloadLost(DataLoss):
    """The request of a future can no longer be read."""

    reason = 'PAYLOAD_LOST'
    future_id: str

    def __str__(self) -> str:
        return f'the request of future {self.future_id!r} can no longer be read; send it again'


@dataclass(eq=False)
class ExportNotFound(NotFound):
    """No such export for this caller."""

    reason = 'EXPORT_NOT_FOUND'
    export_id: str

    def __str__(self) -> str:
        return f'no export {self.export_id!r}'


@dataclass(eq=False)
class HubRefused(FailedPrecondition):
    """A hub does not take an export, however often it is tried."""

    reason = 'HUB_REFUSED'
    target: str

    def __str__(self) -> str:
        return f'{self.target} does not take it: check that the owner exists and that the token may write there'


@dataclass(eq=False)
class CheckpointChanged(FailedPrecondition):
    """The checkpoint was replaced before its export was done."""

    reason = 'CHECKPOINT_CHANGED'
    checkpoint_id: str

    def __str__(self) -> str:
        return f'checkpoint {self.checkpoint_id!r} was replaced before its export was done; export it again'
