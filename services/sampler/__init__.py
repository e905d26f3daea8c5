"""The sampler service: samples the base model and adapters, and keeps adapter versions up to date.

`python -m services.sampler` starts it.
"""

__all__: list[str] = []
