"""Console: the web app, its login, and the contracts over gRPC-Web."""

__all__: list[str] = []
