"""What every service needs and none owns: errors, scopes, ids, clock, config, threads, telemetry, RPC.

A closed list: nothing here knows a service, and nothing is added that only one service uses. What two
services say to each other or take alike (states, chats, ids, times) is converted once, in `rpc`.
"""

__all__: list[str] = []
