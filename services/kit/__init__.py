"""What every service needs and none owns: errors, ids, clock, config, telemetry, RPC.

A closed list: nothing here knows a service, and nothing is added that only one service uses.
"""

__all__: list[str] = []
