"""The services of Twinkle. They communicate over gRPC and never import each other; all of them use
`twinkle_services.kit`.
"""

__all__: list[str] = []
