"""Format of API key secrets, scopes, and the scope that each gRPC method requires.

Every new service needs an entry here; a test compares the table with the contracts.
"""

from collections.abc import Mapping
from enum import StrEnum

SECRET_PREFIX = 'tml-'  # noqa: S105 (not secret)
"""Prefix of every secret, which helps people and secret scanners to recognize secrets."""
MIN_SECRET_LENGTH = 20
"""Minimum number of characters of a secret that an operator chooses."""


class Scope(StrEnum):
    """Permission of an API key. `Scope` in the contract describes each value."""

    TRAIN = 'train'
    SAMPLE = 'sample'
    DATA = 'data'
    OPERATOR = 'operator'
    ADMIN = 'admin'
    FULL_PARAMETERS = 'full_parameters'


class Access(StrEnum):
    """Access requirement of a method that needs no scope."""

    ANY_KEY = 'any'
    """Every valid key may call the method."""
    INTERNAL = 'internal'
    """Only services of the deployment may call the method."""


Requirement = Scope | Access

SERVICES: Mapping[str, Requirement] = {
    'twinkle.api.checkpoint.v1.CheckpointService': Scope.TRAIN,
    'twinkle.api.checkpoint.v1.VersionService': Scope.TRAIN,
    'twinkle.api.checkpoint.v1.WeightStreamService': Access.INTERNAL,
    'twinkle.api.data.v1.DatasetService': Scope.DATA,
    'twinkle.api.data.v1.LoaderService': Scope.DATA,
    'twinkle.api.gateway.v1.CatalogueService': Access.ANY_KEY,
    'twinkle.api.gateway.v1.ExportService': Scope.TRAIN,
    'twinkle.api.gateway.v1.FleetService': Scope.OPERATOR,
    'twinkle.api.gateway.v1.KeyService': Scope.ADMIN,
    'twinkle.api.gateway.v1.MetricService': Scope.TRAIN,
    'twinkle.api.gateway.v1.QuotaService': Scope.ADMIN,
    'twinkle.api.gateway.v1.RolloutService': Scope.TRAIN,
    'twinkle.api.gateway.v1.SessionService': Access.ANY_KEY,
    'twinkle.api.gateway.v1.TraceService': Access.ANY_KEY,
    'twinkle.api.model.v1.AdapterService': Scope.TRAIN,
    'twinkle.api.model.v1.TrainingService': Scope.TRAIN,
    'twinkle.api.sampler.v1.SamplerService': Scope.SAMPLE,
    'twinkle.api.server.v1.ServerService': Access.ANY_KEY,
}
"""Requirement of all methods of a service, except those in `METHODS`."""

METHODS: Mapping[str, Requirement] = {
    'twinkle.api.checkpoint.v1.CheckpointService/CopyCheckpoint': Access.INTERNAL,
    'twinkle.api.checkpoint.v1.CheckpointService/SetCheckpointVisibility': Access.INTERNAL,
    'twinkle.api.checkpoint.v1.CheckpointService/WatchCheckpoints': Access.INTERNAL,
    'twinkle.api.checkpoint.v1.VersionService/DeleteVersions': Access.INTERNAL,
    'twinkle.api.gateway.v1.CatalogueService/PublishCheckpoint': Scope.TRAIN,
    'twinkle.api.gateway.v1.CatalogueService/UnpublishCheckpoint': Scope.TRAIN,
    'twinkle.api.data.v1.DatasetService/GetStoredBytes': Access.INTERNAL,
    'twinkle.api.gateway.v1.FleetService/Lease': Access.INTERNAL,
    'twinkle.api.gateway.v1.FleetService/Register': Access.INTERNAL,
    'twinkle.api.gateway.v1.MetricService/GetMetrics': Access.ANY_KEY,
    'twinkle.api.gateway.v1.MetricService/WatchMetrics': Access.ANY_KEY,
    'twinkle.api.gateway.v1.RolloutService/GetRollout': Access.ANY_KEY,
    'twinkle.api.gateway.v1.RolloutService/ListRollouts': Access.ANY_KEY,
    'twinkle.api.model.v1.AdapterService/EndLease': Scope.OPERATOR,
    'twinkle.api.model.v1.AdapterService/ParkAdapter': Access.INTERNAL,
    'twinkle.api.model.v1.AdapterService/TakeOver': Scope.OPERATOR,
    'twinkle.api.model.v1.AdapterService/WatchAdapters': Access.INTERNAL,
    'twinkle.api.sampler.v1.SamplerService/Pause': Scope.OPERATOR,
    'twinkle.api.sampler.v1.SamplerService/ResetPrefixCache': Scope.OPERATOR,
    'twinkle.api.sampler.v1.SamplerService/Resume': Scope.OPERATOR,
    'twinkle.api.sampler.v1.SamplerService/Sleep': Scope.OPERATOR,
    'twinkle.api.sampler.v1.SamplerService/WakeUp': Scope.OPERATOR,
}
"""Requirements of methods that differ from the requirement of their service."""


def requirement_of(method: str) -> Requirement | None:
    """Return the requirement of a method ('package.Service/Method', no leading slash); None for an unknown service."""
    return METHODS.get(method) or SERVICES.get(method.partition('/')[0])
