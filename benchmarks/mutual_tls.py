"""Cost of mutual TLS between two services: unary calls over plaintext and over mutual TLS alternate within one run.

Caller and services are separate processes. There is one call at a time. The connections are opened before the calls.
The time to open a connection, make one call and close the connection is measured separately.
"""

import asyncio
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gateway_hop import ROUNDS, TOKEN, WARM_UP_CALLS, call_times, milliseconds, running_process
from twinkle_services.kit.certificates import make_certificates
from twinkle_services.kit.rpc.auth import TENANT_KEY
from twinkle_services.kit.rpc.channel import open_forwarding_channel
from twinkle_services.kit.tls import TlsConfig

CALLS_PER_ROUND = 100
CONNECTIONS = 50
METADATA = (('authorization', f'Bearer {TOKEN}'), (TENANT_KEY, 'default'))


def main() -> dict[str, Any]:
    """Run the comparison and return its figures."""
    with tempfile.TemporaryDirectory(prefix='twinkle-bench-') as name, ExitStack() as stack:
        folder = Path(name)
        make_certificates(folder / 'tls', {'gateway': (), 'model': ()})
        plain = {'internal_token': TOKEN, 'telemetry.log_level': 'WARNING'}
        files = {f'tls.{field}': str(path) for field, path in _files(folder / 'tls', 'model').items()}
        secure = {**plain, **files, 'tls.trusted_peers': '["twinkle://gateway"]'}
        addresses = {
            transport: stack.enter_context(running_process('benchmarks.idle_model', folder / transport, settings))
            for transport, settings in {'plaintext': plain, 'mutual_tls': secure}.items()
        }
        caller = TlsConfig(**_files(folder / 'tls', 'gateway'), trusted_peers=())
        return asyncio.run(_measure(addresses, {'plaintext': TlsConfig(), 'mutual_tls': caller}))


async def _measure(addresses: dict[str, str], callers: dict[str, TlsConfig]) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {transport: [] for transport in addresses}
    channels = {
        transport: open_forwarding_channel(address, tls=callers[transport]) for transport, address in addresses.items()
    }
    for channel in channels.values():
        await call_times(channel, METADATA, WARM_UP_CALLS)
    for _ in range(ROUNDS):
        for transport, channel in channels.items():
            seconds[transport] += await call_times(channel, METADATA, CALLS_PER_ROUND)
    for channel in channels.values():
        await channel.close()
    connecting = {transport: await _connecting(addresses[transport], callers[transport]) for transport in addresses}
    figures = {transport: milliseconds(samples) for transport, samples in seconds.items()}
    ratio = figures['mutual_tls']['p50'] / figures['plaintext']['p50']
    return {
        'calls_each': ROUNDS * CALLS_PER_ROUND,
        'milliseconds': figures,
        'ratio_p50': round(ratio, 3),
        'milliseconds_to_connect': {transport: milliseconds(samples) for transport, samples in connecting.items()},
    }


async def _connecting(address: str, tls: TlsConfig) -> list[float]:
    """Return the times in seconds to open a connection, make one call and close the connection."""
    seconds: list[float] = []
    for _ in range(CONNECTIONS):
        begin = time.perf_counter()
        async with open_forwarding_channel(address, tls=tls) as channel:
            await call_times(channel, METADATA, 1)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _files(folder: Path, service: str) -> dict[str, Path]:
    return {'certificate': folder / f'{service}.crt', 'key': folder / f'{service}.key', 'ca': folder / 'ca.crt'}


if __name__ == '__main__':
    print(json.dumps(main(), indent=2))
