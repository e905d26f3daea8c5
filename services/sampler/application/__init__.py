"""What the sampler can be asked to do, one verb a module."""

__all__: list[str] = []
