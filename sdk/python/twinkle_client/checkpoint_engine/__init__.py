"""Synchronization of weights from the trainer to the samplers."""

from twinkle_client.checkpoint_engine.manager import CheckpointEngineManager, SyncedVersion

__all__ = ['CheckpointEngineManager', 'SyncedVersion']
