"""Concurrent tenants for `four_tenants`: each has its own key, client and thread, and logs its results."""

import json
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from examples.cookbook.curves import Curves
from examples.cookbook.recipe import Recipe
from twinkle.tracking import Tracker, open_tracker
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.model import MultiLoraTransformersModel


@dataclass
class Log:
    """Results of a tenant: numbers for the plot, and digests for the bitwise comparison."""

    name: str
    updates: 'queue.SimpleQueue[Mapping[str, float] | None]'
    """Numbers for the thread that records the curves; None means that the tenant has finished."""
    start: threading.Barrier
    """Barrier at which the tenants wait for each other after they have prepared their data."""
    digests: list[str] = field(default_factory=list)
    """Digests of all results, in order."""
    pass_adapter_counts: list[int] = field(default_factory=list)
    """Number of adapters that shared each forward pass."""
    tracker: Tracker = field(default_factory=open_tracker)
    """Tracker of the tenant's run; `track` opens it."""

    def track(self, model: MultiLoraTransformersModel) -> None:
        """Store later numbers and rollouts with the run of the tenant's adapter."""
        self.tracker = open_tracker(metrics=model.metrics(), rollouts=model.rollouts())

    def step(self, output: Mapping[str, Any], *compared: Any, **numbers: float) -> None:
        """Log a step: the output of its forward pass, other arrays to compare, and numbers to record."""
        arrays = [output['loss'], *output['logps'], *compared]
        self.digests += [blake3(np.ascontiguousarray(array).tobytes()).hexdigest() for array in arrays]
        self.pass_adapter_counts.append(output['receipt']['pass_adapter_count'])
        self.tracker.log(numbers, step=len(self.pass_adapter_counts) - 1)
        self.updates.put({f'{self.name}_{name}': number for name, number in numbers.items()})

    def weights(self, client: TwinkleClient, model: MultiLoraTransformersModel) -> None:
        """Save and download the adapter, log the digest of its weights, and delete the adapter."""
        with tempfile.TemporaryDirectory() as folder:
            files = client.download_checkpoint(model.save('final'), folder)
            self.digests.append(blake3((files / 'adapter_model.safetensors').read_bytes()).hexdigest())
        self.remove(model)

    def remove(self, model: MultiLoraTransformersModel) -> None:
        """End the tracker, and delete the adapter."""
        self.tracker.finish()
        model.remove_adapter()


@dataclass(frozen=True)
class Tenant:
    """A tenant and its work."""

    name: str
    work: Callable[[TwinkleClient, Log], None]
    plotted: str
    """Name of the number to plot."""


def run_tenants(
    admin: TwinkleClient, tenants: Sequence[Tenant], *, recipe: Recipe[Any], title: str, steps: int
) -> dict[str, Log]:
    """Run tenants at the same time, record their curves, and return their logs by name.

    The logs are also written to `bits.json` in the output folder. The services store the numbers of each tenant with
    the tenant's run.

    Args:
        admin: Client whose key may create other keys.
        tenants: Tenants with different names.
        recipe: Options of the run, with its output folder.
        title: Title of the plot.
        steps: Number of steps of each tenant.
    """
    updates: queue.SimpleQueue[Mapping[str, float] | None] = queue.SimpleQueue()
    start = threading.Barrier(len(tenants))
    logs = {tenant.name: Log(tenant.name, updates, start) for tenant in tenants}
    plotted = [f'{tenant.name}_{tenant.plotted}' for tenant in tenants]
    with (
        ExitStack() as keys,
        Curves(recipe, title=title, total_steps=len(tenants) * steps, plotted=plotted) as curves,
        ThreadPoolExecutor(len(tenants)) as pool,
    ):
        clients = [client_of(tenant, admin, keys) for tenant in tenants]
        runs = [
            pool.submit(work, tenant, client, logs[tenant.name])
            for tenant, client in zip(tenants, clients, strict=True)
        ]
        try:
            for _ in tenants:
                while (numbers := updates.get()) is not None:
                    curves.record(**numbers)
        except BaseException:
            # Closing the connections aborts the calls in progress, so that the threads can finish.
            for client in clients:
                client.close()
            raise
        for run in runs:
            run.result()
    saved = {name: {'bits': log.digests, 'pass_adapter_counts': log.pass_adapter_counts} for name, log in logs.items()}
    (recipe.out / 'bits.json').write_text(json.dumps(saved, indent=2))
    return logs


def client_of(tenant: Tenant, admin: TwinkleClient, keys: ExitStack) -> TwinkleClient:
    """Return a client with a new key for the tenant; `keys` revokes the key on exit."""
    administration = KeyAdministration(client=admin)
    key, secret = administration.create_key(f'tenant-{tenant.name.lower()}', scopes=['train', 'sample', 'data'])
    keys.callback(administration.revoke_key, key.key_id)
    return TwinkleClient(admin.base_url, secret)


def work(tenant: Tenant, client: TwinkleClient, log: Log) -> None:
    """Run the work of a tenant in its thread, and report the end. A failure breaks the barrier for all tenants."""
    try:
        with client:
            tenant.work(client, log)
    except BaseException:
        log.start.abort()
        log.tracker.finish('failed')
        raise
    finally:
        log.updates.put(None)
