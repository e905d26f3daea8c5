"""OpenAI-compatible HTTP API over the sampler fleet."""

__all__: list[str] = []
