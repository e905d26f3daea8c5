"""Rollouts of runs: sampled completions with rewards and advantages that programs log."""

__all__: list[str] = []
