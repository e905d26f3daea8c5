"""Synchronization of weights from the model service to the samplers."""

from twinkle_client.checkpoint_engine.manager import CheckpointEngineManager, SyncedVersion

__all__ = ['CheckpointEngineManager', 'SyncedVersion']
