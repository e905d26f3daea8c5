"""Shared parts of all services: errors, authorization, ids, clock, configuration, threads, telemetry and RPC.

Modules here depend on no service, and most of them are used by several services. Messages that several services use,
such as chats, ids and times, are converted in `rpc`; weights in transit are in `weights`.
"""

__all__: list[str] = []
