"""HTTP listener: connections, bodies, routes and error handling, shared by the OpenAI and Tinker APIs."""

__all__: list[str] = []
