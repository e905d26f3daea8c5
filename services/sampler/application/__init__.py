"""Use cases of the sampler: sampling, engine control, resident adapters, the relay of weights, and the fleet."""

__all__: list[str] = []
