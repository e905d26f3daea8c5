"""OpenAI's API over the fleet."""

__all__: list[str] = []
