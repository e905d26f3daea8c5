"""OpenAI's API for text: models, completions and chat completions, over the samplers behind the gateway."""

__all__: list[str] = []
