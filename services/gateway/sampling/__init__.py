"""Sampling on the fleet: routing, failover, fair slots, quotas, and handles of the weights to sample from."""

__all__: list[str] = []
