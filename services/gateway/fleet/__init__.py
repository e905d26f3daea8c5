"""The samplers behind this gateway: registration, leases, load and routing."""

__all__: list[str] = []
