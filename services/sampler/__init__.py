"""The sampler service: continues prompts on a base model and its adapters, many tenants at once."""

__all__: list[str] = []
