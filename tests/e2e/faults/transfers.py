"""Weight transfers from a trainer to a sampler with faults: killed processes, cut connections and full disks.

Each seed publishes one version with one fault. Either the service is killed at a failpoint, or a fault occurs after a
number of bytes: the trainer, the checkpoint service or the sampler is killed, a connection is cut, or the service's
disk is full for a short time. The version must still arrive.
"""

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.faults.schedule import DEATHS
from fixtures.byte_proxy import ByteProxy
from fixtures.checkpoint_service import ALICE
from fixtures.faulty_service import free_port
from fixtures.faulty_weights import FaultyWeights, Peer
from fixtures.weight_peers import ADAPTER_ID, Arrival, PublishRequest, weights_of
from twinkle.checkpoint_engine import state_digest
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.failpoints import TRANSFER_FAILPOINTS
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights import Segments
from twinkle_services.kit.weights.wire import WeightClient

_SEED_LIMIT_SECONDS = 120
"""Time limit for a seed; a transfer that exceeds the limit hangs."""
_SIZES = (64 << 10, 1 << 20, 6 << 20)
"""Sizes of the published versions, in bytes."""
_CUT_SIZE_BYTES = 32 << 20
"""Size of a version whose transfer is interrupted."""
_MIN_RESENT_BYTES = 12 << 20
_MAX_RESENT_SHARE = 0.9
"""A transfer has restarted instead of resumed if it sends more bytes again than `_MIN_RESENT_BYTES` and than this share
of the bytes before the cut. A resumed transfer repeats the current chunk and all unread data: the buffers of two
sockets and the HTTP/2 window grow to 23 MiB if a busy machine delays the reader."""
_SHARED_BYTES = 1000
"""Approximate number of bytes on the wire for a state in shared memory."""
_RING_CAPACITY = 4
"""Number of unpinned versions that the service keeps by default."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The version and the fault of one seed."""

    seed: int
    size_bytes: int
    fault: str
    """The killed process (`service`, `trainer` or `sampler`), the cut connection (`publish cut` or `subscribe cut`),
    `full disk`, or the failpoint."""
    at: float
    """Position of the fault, as a fraction of the transfer's bytes. A failpoint uses `count` instead."""
    count: int
    """Number of times that the service reaches the failpoint; the last time kills the service."""
    is_sharing: bool
    """Whether trainer and sampler share memory with the service."""
    is_pinned: bool

    @property
    def request(self) -> PublishRequest:
        """Request that publishes the version, whose number is the seed plus 1."""
        return PublishRequest(self.seed + 1, self.size_bytes, self.is_pinned)


_NETWORK_FAULTS = (
    ('subscribe cut', 'weights.chunk', 'trainer', 'publish cut', 'weights.received', 'full disk', 'sampler'),
    ('subscribe cut', 'weights.chunk', 'service', 'publish cut', 'weights.recorded', 'full disk', 'spill.begun'),
)
"""Faults of transfers over the network: a tuple for even cycles and a tuple for odd cycles."""
_MEMORY_FAULTS = (
    ('service', 'weights.verified', 'weights.recorded', 'weights.announced', 'full disk', 'spill.begun', 'spill.done'),
    ('trainer', 'sampler', 'weights.received', 'weights.verified', 'weights.announced', 'full disk', 'spill.done'),
)
"""Faults of transfers in shared memory, for even and for odd cycles."""
SEEDS_PER_CYCLE = 14
"""Number of seeds in a cycle. The first half uses the network, and the second half uses shared memory."""


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed."""
    rng = random.Random(seed)
    cycle, index = divmod(seed, SEEDS_PER_CYCLE)
    faults = (*_NETWORK_FAULTS[cycle % 2], *_MEMORY_FAULTS[cycle % 2])
    is_sharing = index >= len(_NETWORK_FAULTS[0])
    # A transfer with a cut must be larger than all buffers, or no bytes would be sent again.
    size_bytes = _CUT_SIZE_BYTES if faults[index].endswith('cut') else rng.choice(_SIZES)
    return Plan(
        seed=seed,
        size_bytes=size_bytes,
        fault=faults[index],
        at=rng.random(),
        count=rng.randint(1, max(size_bytes >> 20, 1)) if faults[index] == 'weights.chunk' else 1,
        is_sharing=is_sharing,
        is_pinned=rng.random() < 0.2,
    )


@dataclass
class TransferReport:
    """Results of all seeds."""

    violations: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """Violations by seed."""
    deaths: dict[str, int] = field(default_factory=dict[str, int])
    """Number of faults by name."""
    arrivals: dict[str, int] = field(default_factory=dict[str, int])
    """Number of received versions by encoding."""
    cut_at_bytes: int = 0
    """Sum of the positions of all cuts of the sampler's connection: the bytes that restarts from 0 would send again."""
    resent_bytes: int = 0
    """Number of bytes that were sent to the sampler again after these cuts, including overhead."""

    def add(self, seed: int, line: str) -> None:
        self.violations.setdefault(seed, []).append(line)

    def __str__(self) -> str:
        deaths = ', '.join(f'{name} {count}' for name, count in sorted(self.deaths.items()))
        arrivals = ', '.join(f'{count} {name}' for name, count in sorted(self.arrivals.items()))
        return (
            f'{len(self.violations)} seeds with violations; faults: {deaths}; arrivals: {arrivals}; '
            f'samplers were cut off after {self.cut_at_bytes} bytes in total; {self.resent_bytes} bytes were sent again'
        )


class TransferHarness:
    """The checkpoint service, and a trainer and a sampler, each connected to the service by a proxy.

    Args:
        folder: Folder for all files, including the segments of shared memory.
    """

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.memory = folder / 'service' / 'memory'
        self.service = FaultyWeights(folder / 'service', port)
        self.publishing = ByteProxy(port, is_counting_responses=False)
        self.subscribing = ByteProxy(port, is_counting_responses=True)
        self.report = TransferReport()
        self._expected: dict[int, str] = {}
        self._published: list[PublishRequest] = []
        self._arrived = 0

    async def run(self, seeds: Iterable[int]) -> TransferReport:
        """Run the seeds one after the other, and check the stored versions and the shared memory at the end."""
        self.trainer = Peer('publish', await self.publishing.start(), self.memory)
        self.sampler = Peer('follow', await self.subscribing.start(), self.memory)
        seed = 0
        try:
            for seed in seeds:
                async with asyncio.timeout(_SEED_LIMIT_SECONDS):
                    await self._run_one(plan_of(seed))
            await self._check_stored(seed)
        except TimeoutError:
            self.report.add(seed, f'the transfer hangs: {plan_of(seed)}')
        finally:
            await self._stop(seed)
        return self.report

    async def _run_one(self, plan: Plan) -> None:
        await self.service.ensure_running(plan.fault if plan.fault in TRANSFER_FAILPOINTS else '', plan.count)
        await self.trainer.ensure_running(is_sharing=plan.is_sharing)
        if plan.fault == 'subscribe cut':
            # A new sampler receives the complete state.
            await self.sampler.end()
        if await self.sampler.ensure_running(is_sharing=plan.is_sharing):
            self._arrived = 0
        self._expected[plan.request.version] = weights_of(plan.request.version, plan.size_bytes).manifest.digest
        self._arm(plan)
        passed_bytes = self.subscribing.passed_bytes
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish(plan))
            received_bytes = await self._receive(plan)
        self.publishing.disarm()
        self.subscribing.disarm()
        self._check_resent_bytes(plan, self.subscribing.passed_bytes - passed_bytes - received_bytes)
        if plan.fault in TRANSFER_FAILPOINTS:
            await self.service.wait_for_death()
            self._count(plan.fault)

    def _arm(self, plan: Plan) -> None:
        """Prepare the fault of a seed unless the fault is a failpoint."""
        actions: dict[str, tuple[ByteProxy, Callable[[], object]]] = {
            'service': (self.publishing, self.service.kill),
            'trainer': (self.publishing, self.trainer.kill),
            'publish cut': (self.publishing, self.publishing.cut),
            'full disk': (self.publishing, self.service.fill_disk),
            'sampler': (self.subscribing, self.sampler.kill),
            'subscribe cut': (self.subscribing, self.subscribing.cut),
        }
        if plan.fault in actions:
            proxy, action = actions[plan.fault]
            # With shared memory, only a few bytes pass through the proxy.
            size_bytes = _SHARED_BYTES if plan.is_sharing else plan.size_bytes
            proxy.arm(int(plan.at * size_bytes), lambda: (self._count(plan.fault), action()))

    def _count(self, fault: str) -> None:
        self.report.deaths[fault] = self.report.deaths.get(fault, 0) + 1

    async def _publish(self, plan: Plan) -> None:
        """Request the version until the trainer has published it; restart the trainer after a kill."""
        published: dict[str, Any] = {}
        while 'digest' not in published:
            await self.trainer.ensure_running(is_sharing=plan.is_sharing)
            self.trainer.send(plan.request)
            published = await self.trainer.read_message() or {}
        if published['digest'] != self._expected[plan.request.version]:
            self.report.add(plan.seed, f'published with another digest: {published}')
        self._published.append(plan.request)

    async def _receive(self, plan: Plan) -> int:
        """Receive versions until the version of the plan arrives; return their size in bytes on the wire.

        A killed sampler is restarted.
        """
        received_bytes = 0
        while self._arrived < plan.request.version:
            message = await self.sampler.read_message()
            if message is None:
                await self.sampler.ensure_running(is_sharing=plan.is_sharing)
                self._arrived = 0
                continue
            arrival = Arrival(**message)
            received_bytes += arrival.wire_size_bytes
            self.report.arrivals[arrival.encoding] = self.report.arrivals.get(arrival.encoding, 0) + 1
            if arrival.digest != self._expected.get(arrival.version):
                self.report.add(plan.seed, f'a mixed or unknown state arrived: {arrival}')
            if arrival.version <= self._arrived:
                self.report.add(plan.seed, f'version {arrival.version} arrived after {self._arrived}')
            self._arrived = arrival.version
        return received_bytes

    def _check_resent_bytes(self, plan: Plan, extra_bytes: int) -> None:
        """Check that a transfer resumed after a cut and did not restart."""
        if plan.fault == 'subscribe cut':
            cut_at_bytes = int(plan.at * plan.size_bytes)
            self.report.cut_at_bytes += cut_at_bytes
            self.report.resent_bytes += max(extra_bytes, 0)
            if extra_bytes > max(_MIN_RESENT_BYTES, _MAX_RESENT_SHARE * cut_at_bytes):
                self.report.add(plan.seed, f'{extra_bytes} bytes were sent again after one cut')

    async def _check_stored(self, seed: int) -> None:
        """Check that the service stores the pinned versions and the newest versions bitwise."""
        stored = {request for request in self._published if request.is_pinned} | set(self._published[-1:])
        stored |= set([request for request in self._published if not request.is_pinned][-_RING_CAPACITY:])
        async with open_channel(self.service.address) as channel:
            with acting_for(ALICE):
                client = WeightClient(channel)
                for request in stored:
                    await self._check_version(client, seed, request.version)

    async def _check_version(self, client: WeightClient, seed: int, version: int) -> None:
        try:
            received = await client.fetch_version(ADAPTER_ID, version)
        except DomainError as error:
            self.report.add(seed, f'version {version} was published but cannot be fetched: {error}')
            return
        if state_digest(received.state.data) != self._expected[version]:
            self.report.add(seed, f'the stored state of version {version} differs from the published state')

    async def _stop(self, seed: int) -> None:
        """Stop all processes; check the exit statuses of the service, and that no segment remains in shared memory."""
        await self.trainer.end()
        await self.sampler.end()
        await self.publishing.stop()
        await self.subscribing.stop()
        await self.service.stop()
        *killed, terminated = self.service.statuses
        if terminated or any(-status not in DEATHS for status in killed):
            self.report.add(seed, f'the service exited unexpectedly: {self.service.statuses}')
        # The next process that opens the folder removes the segments of killed processes.
        Segments(self.memory)
        remaining = sorted(path.name for path in self.memory.iterdir() if path.name != 'host')
        if [name for name in remaining if not name.startswith('owner-')]:
            self.report.add(seed, f'remaining in shared memory: {remaining}')
