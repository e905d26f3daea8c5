"""Errors that only the gateway raises. Shared errors are in `twinkle_services.kit.errors`."""

from twinkle_services.kit.errors import (
    AlreadyExists,
    DataLoss,
    Disposition,
    FailedPrecondition,
    NotBuiltYet,
    NotFound,
    QuotaExceeded,
    ServiceUnreachable,
    Unavailable,
    domain_error,
)


@domain_error('SESSION_NOT_FOUND', 'no session {session_id!r}')
class SessionNotFound(NotFound):
    """The caller has no such session."""

    session_id: str


@domain_error('SESSION_FINISHED', 'session {session_id!r} is finished; create another one')
class SessionFinished(FailedPrecondition):
    """The client has finished the session."""

    session_id: str


@domain_error('RUN_NOT_FOUND', 'no run {run_id!r}')
class RunNotFound(NotFound):
    """The caller has no such run."""

    run_id: str


@domain_error(
    'VERSION_NOT_FOUND',
    'adapter {adapter_id!r} has no published version; publish its weights with publish_version(), or with '
    'save_weights_for_sampler() of a Tinker client, before sampling from it',
)
class AdapterNotPublished(NotFound):
    """The adapter exists, but has no published version to sample from."""

    adapter_id: str


@domain_error('CHECKPOINT_NOT_FOUND', 'no weights {checkpoint_id!r}; save them with save_weights_for_sampler() first')
class WeightsNotSaved(NotFound):
    """A Tinker client has not saved weights under the path that it samples from."""

    checkpoint_id: str


@domain_error('QUOTA_EXCEEDED', 'the run exceeds quota {quota!r}, which is {limit}; log fewer values, or to a new run')
class MetricsFull(QuotaExceeded):
    """The run has too many points or names of metrics."""


@domain_error(
    'QUOTA_EXCEEDED',
    'the runs of the tenant exceed quota {quota!r}, which is {limit}; log fewer values, or ask an administrator for a '
    'larger quota. The values of a run are removed 30 days after it has ended, unless it has checkpoints',
)
class TenantMetricsFull(MetricsFull):
    """All runs of the tenant together have too many points."""


@domain_error(
    'STORED_DATA_DAMAGED',
    'the stored {kind} of run {id!r} are damaged; restore the database, or log to a new run',
    disposition=Disposition.REFUSED,
)
class RunDataDamaged(DataLoss):
    """The stored metrics or rollouts of a run cannot be read."""

    id: str
    kind: str


@domain_error(
    'STORED_DATA_DAMAGED',
    'a stored value of {kind} {id!r} is damaged; the operator must restore the database from a backup',
    disposition=Disposition.REFUSED,
)
class StoredRowDamaged(DataLoss):
    """A stored text is not UTF-8: the SQLite database is damaged, and the damage was accepted at the start."""

    id: str
    kind: str = 'column'


@domain_error('ROLLOUT_NOT_FOUND', 'the run has no rollout {rollout_id!r}; old ones are removed when a run is full')
class RolloutNotFound(NotFound):
    """The run has no such rollout, or the rollout was removed to make room for newer ones."""

    rollout_id: str


@domain_error(
    'QUOTA_EXCEEDED',
    'the rollouts exceed quota {quota!r}, which is {limit}; log fewer rollouts, or leave out their tokens',
)
class RolloutsTooLarge(QuotaExceeded):
    """The groups that a request changes have more bytes than a run or a request may have."""


@domain_error('TRACE_NOT_FOUND', 'no trace {trace_id!r}; only the newest spans are stored')
class TraceNotFound(NotFound):
    """No stored span of the trace is visible to the caller."""

    trace_id: str


@domain_error(
    'NOT_BUILT_YET',
    'this gateway has no folder of traces: spans are sent to the OTLP collector of the deployment, if there is one; to '
    'see them here, set telemetry.trace_dir of all services to one folder, as `twinkle up` does',
)
class TracesNotStored(NotBuiltYet):
    """The gateway's configuration names no folder of traces."""


@domain_error('KEY_NOT_FOUND', 'no API key {key_id!r}')
class KeyNotFound(NotFound):
    """No such API key exists."""

    key_id: str


@domain_error('KEY_ENDED', 'API key {key_id!r} is no longer valid; create another one')
class KeyEnded(FailedPrecondition):
    """The key is revoked, expired or retired, so it cannot be rotated."""

    key_id: str


@domain_error(
    'PROJECT_NOT_FOUND',
    'no project {project_id!r}; an administrator creates projects with `twinkle projects create TENANT PROJECT`',
)
class ProjectNotFound(NotFound):
    """The tenant has no such project."""

    project_id: str


@domain_error('TENANT_NOT_FOUND', 'no tenant {tenant_id!r}')
class TenantNotFound(NotFound):
    """No such tenant exists."""

    tenant_id: str


@domain_error('REPLICA_NOT_FOUND', 'no replica {replica_id!r} in the fleet')
class ReplicaNotFound(NotFound):
    """The fleet has no such replica, or the replica's lease has expired."""

    replica_id: str


@domain_error('NO_REPLICA', disposition=Disposition.RETRYABLE)
class NoReplica(Unavailable):
    """No replica of the fleet can serve the request at the moment."""

    service: str
    base_model: str = ''

    def __str__(self) -> str:
        suffix = f' for {self.base_model!r}' if self.base_model else ''
        return f'the fleet has no {self.service}{suffix} at the moment; retry later, or see `twinkle fleet`'


@domain_error('REQUEST_NOT_FOUND', 'no request {request_id!r} is running')
class SamplingNotFound(NotFound):
    """The caller has no running sampling request with this id."""

    request_id: str


@domain_error(
    'ID_TAKEN', 'adapter_id {id!r} was used before, with a different base model; choose another id or leave it empty'
)
class AdapterIdTaken(AlreadyExists):
    """The caller used the id for an adapter of a different base model."""

    id: str
    kind: str = 'adapter'


@domain_error('ID_TAKEN', 'a request with request_id {id!r} is running; choose another id or leave it empty')
class SamplingIdTaken(AlreadyExists):
    """The caller already has a running sampling request with this id."""

    id: str
    kind: str = 'request'


@domain_error(
    'SERVICE_UNREACHABLE',
    'the sampler was lost, and another one cannot continue a stream that samples from a checkpoint path, because the '
    'path may name other weights now; send the request again, or name the adapter and its version',
)
class CheckpointStreamLost(ServiceUnreachable):
    """A sampler was lost during a stream that no other sampler may continue."""


@domain_error('SERVICE_UNREACHABLE')
class BaseModelsUnreachable(ServiceUnreachable):
    """A request to all model services failed, because the services of some base models cannot be reached."""

    base_models: str
    """Sorted names, separated by commas; empty if a service has not reported its base models yet."""

    def __str__(self) -> str:
        names = self.base_models or 'a base model that is not known yet'
        return f'the model service of {names} cannot be reached at the moment, so the list is incomplete; retry later'


@domain_error(
    'SERVICE_UNREACHABLE',
    'the {service} service cannot be reached at the moment; retry later',
    disposition=Disposition.RETRYABLE,
)
class ReplicaNotReached(ServiceUnreachable):
    """The connection to a replica failed, so the replica never received the request."""


@domain_error(
    'REQUEST_CRASHED',
    '{failure_count} processes in a row ended while they ran this request, so it is not run again for several minutes; '
    'change the request, for example its length or its parameters',
)
class RequestCrashed(FailedPrecondition):
    """Several processes in a row ended while they ran the request, so the request may be the cause."""

    failure_count: int


@domain_error('FUTURE_NOT_FOUND', 'no future {future_id!r}')
class FutureNotFound(NotFound):
    """The caller has no such future."""

    future_id: str


@domain_error('FUTURE_EXPIRED', 'the outcome of future {future_id!r} is no longer stored')
class FutureExpired(NotFound):
    """The future's outcome is no longer stored."""

    future_id: str


@domain_error('POSITION_MISSING', 'position {missing} of {lane!r} never arrived; position {position} waited for it')
class PositionMissing(FailedPrecondition):
    """The future waited for an earlier position of its lane that never arrived."""

    lane: str
    position: int
    missing: int


@domain_error(
    'POSITION_PASSED',
    'position {position} of {lane!r} arrived too late: another request used it, or the lane continued without it',
)
class PositionPassed(FailedPrecondition):
    """The future's position was already used, or its lane had already continued without it."""

    lane: str
    position: int


@domain_error(
    'PAYLOAD_LOST', 'the request or result of future {future_id!r} is damaged or missing on the disk of the gateway'
)
class PayloadLost(DataLoss):
    """The request or the result of a future can no longer be read."""

    future_id: str


@domain_error('EXPORT_NOT_FOUND', 'no export {export_id!r}')
class ExportNotFound(NotFound):
    """The caller has no such export."""

    export_id: str


@domain_error(
    'HUB_REFUSED', '{target} refuses the upload: check that the owner exists and that the token may write there'
)
class HubRefused(FailedPrecondition):
    """A hub refuses an export permanently."""

    target: str


@domain_error(
    'CHECKPOINT_CHANGED', 'checkpoint {checkpoint_id!r} was replaced before its export was complete; export it again'
)
class CheckpointChanged(FailedPrecondition):
    """The checkpoint was replaced before its export was complete."""

    checkpoint_id: str
