"""Fresh weights from the trainer to the samplers of the server."""

from twinkle_client.checkpoint_engine.manager import CheckpointEngineManager, SyncedVersion

__all__ = ['CheckpointEngineManager', 'SyncedVersion']
