"""Mode 'ray': worker processes on a Ray cluster, and the components that they host. Nothing else imports Ray."""

__all__: list[str] = []
