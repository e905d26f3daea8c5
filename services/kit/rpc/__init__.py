"""RPC for every service: server and channel builders, interceptors, status mapping.

The only room of the kit that knows gRPC. Business never enters here.
"""

__all__: list[str] = []
