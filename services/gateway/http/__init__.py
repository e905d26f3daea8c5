"""The HTTP listener: connections, bodies, guards and calls, shared by the OpenAI and Tinker APIs."""

__all__: list[str] = []
