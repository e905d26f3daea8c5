"""gRPC for all services: servers, channels, interceptors, status mapping and message conversion.

Modules here contain no business logic. Weights have their own messages in `twinkle_services.kit.weights.wire`.
"""

__all__: list[str] = []
