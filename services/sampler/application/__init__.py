"""Use cases of the sampler, one class for each resource: sampling, engine control, resident adapters, relay, fleet."""

__all__: list[str] = []
