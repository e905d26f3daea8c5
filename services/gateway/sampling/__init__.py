"""Sampling requests: dispatch to a sampler, failover, batches and fair slots."""

__all__: list[str] = []
