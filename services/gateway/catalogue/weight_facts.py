"""What is known of weights to sample from, of the services that own them."""

from services.gateway.fleet.upstreams import GrpcLookups
from twinkle.api.checkpoint.v1 import checkpoint_pb2
from twinkle.api.model.v1 import adapter_pb2, training_service_pb2


class GrpcWeightFacts:
    """Implements `sampling_handles.WeightFacts`."""

    def __init__(self, lookups: GrpcLookups) -> None:
        """Ask by `lookups`."""
        self._lookups = lookups

    async def base_of_adapter(self, adapter_id: str) -> str:
        """Return an adapter's base model."""
        return adapter_pb2.Adapter.FromString(await self._lookups.adapter(adapter_id)).base_model

    async def base_of_checkpoint(self, checkpoint_path: str) -> str:
        """Return the base model of saved weights, by our own path."""
        return checkpoint_pb2.Checkpoint.FromString(await self._lookups.checkpoint(checkpoint_path)).base_model

    async def unpin(self, adapter_id: str, version: int) -> None:
        """Let a version leave the ring in its turn."""
        await self._lookups.unpin(adapter_id, version)

    def version_of(self, result: bytes) -> int:
        """Return the version that an operation published, of its result."""
        return training_service_pb2.ExecuteResponse.FromString(result).result.publish.version
