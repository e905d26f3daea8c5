"""The services of Twinkle, which communicate over gRPC. They import `twinkle_services.kit`, and never each other."""

__all__: list[str] = []
