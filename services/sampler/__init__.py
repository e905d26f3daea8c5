"""The sampler service samples from the base model and from adapters, and keeps adapter versions up to date.

`python -m twinkle_services.sampler` starts it.
"""

__all__: list[str] = []
