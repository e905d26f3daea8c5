"""Several tenants at once: each with a key, a client and a thread of its own, and a log of what it saw."""

import json
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from examples.cookbook.curves import Curves
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.model import MultiLoraTransformersModel


@dataclass
class Log:
    """What a tenant saw: numbers for people, and every bit for the comparison."""

    name: str
    news: 'queue.SimpleQueue[Mapping[str, float] | None]'
    """To the thread that draws; None: the tenant has ended."""
    begin: threading.Barrier
    """Where the tenants wait for each other, once their data is ready."""
    bits: list[str] = field(default_factory=list)
    pass_adapter_counts: list[int] = field(default_factory=list)

    def step(self, output: Mapping[str, Any], *exact: Any, **numbers: float) -> None:
        """Take what came of a step: the output of a forward pass, what else must be equal, and what is drawn."""
        arrays = [output['loss'], *output['logps'], *exact]
        self.bits += [blake3(np.ascontiguousarray(array).tobytes()).hexdigest() for array in arrays]
        self.pass_adapter_counts.append(output['receipt']['pass_adapter_count'])
        self.news.put({f'{self.name}_{name}': number for name, number in numbers.items()})

    def weights(self, client: TwinkleClient, model: MultiLoraTransformersModel) -> None:
        """Take the digest of the adapter as it is now, downloaded as anybody would, and remove it."""
        with tempfile.TemporaryDirectory() as folder:
            files = client.download_checkpoint(model.save('final'), folder)
            self.bits.append(blake3((files / 'adapter_model.safetensors').read_bytes()).hexdigest())
        model.remove_adapter()


@dataclass(frozen=True)
class Tenant:
    """Who does what."""

    name: str
    work: Callable[[TwinkleClient, Log], None]
    plotted: str
    """Name of the number that is drawn."""


def run_tenants(
    admin: TwinkleClient, tenants: Sequence[Tenant], *, out: Path, title: str, steps: int
) -> dict[str, Log]:
    """Run tenants at once, draw what they tell, and return their logs, which are written beside the curves.

    Args:
        admin: whose key may make others.
        tenants: with names of their own.
        out: folder of the curves.
        title: of the plot.
        steps: of each tenant.
    """
    news: queue.SimpleQueue[Mapping[str, float] | None] = queue.SimpleQueue()
    begin = threading.Barrier(len(tenants))
    logs = {tenant.name: Log(tenant.name, news, begin) for tenant in tenants}
    plotted = [f'{tenant.name}_{tenant.plotted}' for tenant in tenants]
    with (
        ExitStack() as keys,
        Curves(out, title=title, total_steps=len(tenants) * steps, plotted=plotted) as curves,
        ThreadPoolExecutor(len(tenants)) as pool,
    ):
        clients = [client_of(tenant, admin, keys) for tenant in tenants]
        runs = [
            pool.submit(work, tenant, client, logs[tenant.name])
            for tenant, client in zip(tenants, clients, strict=True)
        ]
        try:
            for _ in tenants:
                while (numbers := news.get()) is not None:
                    curves.record(**numbers)
        except BaseException:
            # The threads end with the calls that they wait for, and those with the connections.
            for client in clients:
                client.close()
            raise
        for run in runs:
            run.result()
    saved = {name: {'bits': log.bits, 'pass_adapter_counts': log.pass_adapter_counts} for name, log in logs.items()}
    (out / 'bits.json').write_text(json.dumps(saved, indent=2))
    return logs


def client_of(tenant: Tenant, admin: TwinkleClient, keys: ExitStack) -> TwinkleClient:
    """Return a client with a key of the tenant's own, which `keys` revokes."""
    administration = KeyAdministration(client=admin)
    key, secret = administration.create_key(f'tenant-{tenant.name.lower()}', scopes=['train', 'sample', 'data'])
    keys.callback(administration.revoke_key, key.key_id)
    return TwinkleClient(admin.base_url, secret)


def work(tenant: Tenant, client: TwinkleClient, log: Log) -> None:
    """Do a tenant's work in its thread; say so when it has ended, and let nobody wait for one that failed."""
    try:
        with client:
            tenant.work(client, log)
    except BaseException:
        log.begin.abort()
        raise
    finally:
        log.news.put(None)
