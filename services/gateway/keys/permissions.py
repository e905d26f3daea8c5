"""Which scope each method of every contract needs. Data only.

A new service needs a decision here, and a test says so.
"""

from collections.abc import Mapping
from enum import StrEnum

from services.gateway.keys.api_key import Scope


class Access(StrEnum):
    """What stands where no scope does."""

    ANY_KEY = 'any'
    """Every good key may call it."""
    INTERNAL = 'internal'
    """Between services only; no key may."""


Requirement = Scope | Access

_SERVICES: Mapping[str, Requirement] = {
    'twinkle.api.checkpoint.v1.CheckpointService': Scope.TRAIN,
    'twinkle.api.checkpoint.v1.VersionService': Scope.TRAIN,
    'twinkle.api.checkpoint.v1.WeightStreamService': Access.INTERNAL,
    'twinkle.api.data.v1.DatasetService': Scope.DATA,
    'twinkle.api.data.v1.LoaderService': Scope.DATA,
    'twinkle.api.gateway.v1.CatalogueService': Access.ANY_KEY,
    'twinkle.api.gateway.v1.ExportService': Scope.TRAIN,
    'twinkle.api.gateway.v1.FleetService': Scope.OPERATOR,
    'twinkle.api.gateway.v1.KeyService': Scope.ADMIN,
    'twinkle.api.gateway.v1.QuotaService': Scope.ADMIN,
    'twinkle.api.gateway.v1.SessionService': Access.ANY_KEY,
    'twinkle.api.model.v1.AdapterService': Scope.TRAIN,
    'twinkle.api.model.v1.TrainingService': Scope.TRAIN,
    'twinkle.api.sampler.v1.SamplerService': Scope.SAMPLE,
    'twinkle.api.server.v1.ServerService': Access.ANY_KEY,
}
"""What a service's methods need unless they are named below."""

_METHODS: Mapping[str, Requirement] = {
    'twinkle.api.checkpoint.v1.CheckpointService/CopyCheckpoint': Access.INTERNAL,
    'twinkle.api.checkpoint.v1.CheckpointService/SetCheckpointVisibility': Access.INTERNAL,
    'twinkle.api.checkpoint.v1.CheckpointService/WatchCheckpoints': Access.INTERNAL,
    'twinkle.api.gateway.v1.CatalogueService/PublishCheckpoint': Scope.TRAIN,
    'twinkle.api.gateway.v1.CatalogueService/UnpublishCheckpoint': Scope.TRAIN,
    'twinkle.api.gateway.v1.FleetService/Lease': Access.INTERNAL,
    'twinkle.api.gateway.v1.FleetService/Register': Access.INTERNAL,
    'twinkle.api.model.v1.AdapterService/ParkAdapter': Access.INTERNAL,
    'twinkle.api.model.v1.AdapterService/WatchAdapters': Access.INTERNAL,
    'twinkle.api.sampler.v1.SamplerService/Pause': Scope.OPERATOR,
    'twinkle.api.sampler.v1.SamplerService/ResetPrefixCache': Scope.OPERATOR,
    'twinkle.api.sampler.v1.SamplerService/Resume': Scope.OPERATOR,
    'twinkle.api.sampler.v1.SamplerService/Sleep': Scope.OPERATOR,
    'twinkle.api.sampler.v1.SamplerService/WakeUp': Scope.OPERATOR,
}
"""Methods that differ from the rest of their service."""


def requirement_of(method: str) -> Requirement | None:
    """Return what `method` ('package.Service/Method', no leading slash) needs; None where the service is not known."""
    return _METHODS.get(method) or _SERVICES.get(method.partition('/')[0])


def services_with_rules() -> frozenset[str]:
    """Return the full names of all services that the table names."""
    return frozenset(_SERVICES)


def methods_with_rules() -> frozenset[str]:
    """Return the full names of the methods that the table names one by one."""
    return frozenset(_METHODS)
