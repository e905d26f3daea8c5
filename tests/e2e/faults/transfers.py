"""Weights on their way from a trainer to a sampler, while the trainer, the service and the sampler are killed.

A seed publishes one version. While it is on its way one of the three processes dies by SIGKILL, at a byte of
the transfer or at a failpoint of the service, or a connection is cut at a byte. Then the version has to arrive.
"""

import asyncio
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fixtures.byte_proxy import ByteProxy
from fixtures.checkpoint_service import ALICE
from fixtures.faulty_service import free_port
from fixtures.faulty_weights import FaultyWeights, Peer
from fixtures.weight_peers import ADAPTER_ID, Arrival, Order, weights_of
from services.kit.errors import DomainError
from services.kit.failpoints import TRANSFER_FAILPOINTS
from services.kit.rpc.channel import open_channel
from services.kit.rpc.context import acting_for
from services.kit.weights import Segments
from services.kit.weights.wire import WeightClient
from twinkle.checkpoint_engine import state_digest

_SEED_LIMIT_SECONDS = 120
"""A seed that takes longer hangs."""
_SIZES = (64 << 10, 1 << 20, 6 << 20)
_CUT_SIZE_BYTES = 32 << 20
_SENT_AGAIN_BYTES = 12 << 20
"""Most that one break may cost: the chunk on its way, and what nobody has read yet: the buffers of two sockets and
the window of HTTP/2, which grow to some MiB where a busy machine holds a reader up (8.3 were seen)."""
_SHARED_BYTES = 1000
"""About what goes over the wire when a state does not."""
_RING_CAPACITY = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens to the version of one seed."""

    seed: int
    size_bytes: int
    fault: str
    """What dies or breaks: `service`, `trainer`, `sampler`, `publish cut`, `subscribe cut`, or a failpoint."""
    at: float
    """Where in the transfer, as a part of its bytes; of a failpoint `count` says it."""
    count: int
    is_sharing: bool
    """Whether trainer and sampler share memory with the service."""
    is_pinned: bool

    @property
    def order(self) -> Order:
        """The version, which the seed numbers."""
        return Order(self.seed + 1, self.size_bytes, self.is_pinned)


_BY_BYTES = (
    ('subscribe cut', 'weights.chunk', 'trainer', 'publish cut', 'weights.received', 'sampler'),
    ('subscribe cut', 'weights.chunk', 'service', 'publish cut', 'weights.recorded', 'spill.begun'),
)
_BY_MEMORY = (
    ('service', 'weights.verified', 'weights.recorded', 'weights.announced', 'spill.begun', 'spill.done'),
    ('trainer', 'sampler', 'weights.received', 'weights.verified', 'weights.announced', 'spill.done'),
)
SEEDS_PER_CYCLE = 12
"""A dozen seeds go through all faults, half of them with bytes sent and half with memory shared."""


def plan_of(seed: int) -> Plan:
    """Return what happens to the version of a seed."""
    rng = random.Random(seed)
    cycle, index = divmod(seed, SEEDS_PER_CYCLE)
    faults = (*_BY_BYTES[cycle % 2], *_BY_MEMORY[cycle % 2])
    is_sharing = index >= len(_BY_BYTES[0])
    # A cut that is to cost something needs more bytes than buffers hold.
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
    """What came of some seeds."""

    violations: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    deaths: dict[str, int] = field(default_factory=dict[str, int])
    arrivals: dict[str, int] = field(default_factory=dict[str, int])
    """By encoding."""
    cut_at_bytes: int = 0
    """Where samplers were cut off, summed up: what beginning again would send again."""
    sent_again_bytes: int = 0
    """What was sent again instead, with all that is around the bytes of states."""

    def note(self, seed: int, line: str) -> None:
        """Note a violation."""
        self.violations.setdefault(seed, []).append(line)

    def __str__(self) -> str:
        deaths = ', '.join(f'{name} {count}' for name, count in sorted(self.deaths.items()))
        arrivals = ', '.join(f'{count} {name}' for name, count in sorted(self.arrivals.items()))
        return (
            f'{len(self.violations)} seeds with violations; faults: {deaths}; arrivals: {arrivals}; '
            f'samplers cut off at {self.cut_at_bytes} bytes in all, {self.sent_again_bytes} sent again'
        )


class Stand:
    """The service, a trainer and a sampler, with a proxy before each of the two."""

    def __init__(self, folder: Path) -> None:
        """Keep everything in `folder`, the segments of shared memory too."""
        port = free_port()
        self.memory = folder / 'service' / 'memory'
        self.service = FaultyWeights(folder / 'service', port)
        self.publishing = ByteProxy(port, is_counting_responses=False)
        self.subscribing = ByteProxy(port, is_counting_responses=True)
        self.report = TransferReport()
        self._expected: dict[int, str] = {}
        self._answered: list[Order] = []
        self._arrived = 0

    async def run(self, seeds: range) -> TransferReport:
        """Go through the seeds, then see what is left."""
        self.trainer = Peer('publish', await self.publishing.start(), self.memory)
        self.sampler = Peer('follow', await self.subscribing.start(), self.memory)
        seed = seeds[0]
        try:
            for seed in seeds:
                async with asyncio.timeout(_SEED_LIMIT_SECONDS):
                    await self._run_one(plan_of(seed))
            await self._check_kept(seed)
        except TimeoutError:
            self.report.note(seed, f'hangs; {plan_of(seed)}')
        finally:
            await self._end(seed)
        return self.report

    async def _run_one(self, plan: Plan) -> None:
        await self.service.ensure(plan.fault if plan.fault in TRANSFER_FAILPOINTS else '', plan.count)
        await self.trainer.ensure(is_sharing=plan.is_sharing)
        if plan.fault == 'subscribe cut':
            # A newcomer, so that it comes whole.
            await self.sampler.end()
        if await self.sampler.ensure(is_sharing=plan.is_sharing):
            self._arrived = 0
        self._expected[plan.order.version] = weights_of(plan.order.version, plan.size_bytes).manifest.digest
        self._arm(plan)
        passed_bytes = self.subscribing.passed_bytes
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish(plan))
            wanted_bytes = await self._receive(plan)
        self.publishing.disarm()
        self.subscribing.disarm()
        self._note_sent_again(plan, self.subscribing.passed_bytes - passed_bytes - wanted_bytes)
        if plan.fault in TRANSFER_FAILPOINTS:
            await self.service.until_dead()
            self._count(plan.fault)

    def _arm(self, plan: Plan) -> None:
        """Have the fault of a seed happen at its byte."""
        acts: dict[str, tuple[ByteProxy, Callable[[], object]]] = {
            'service': (self.publishing, self.service.kill),
            'trainer': (self.publishing, self.trainer.kill),
            'publish cut': (self.publishing, self.publishing.cut),
            'sampler': (self.subscribing, self.sampler.kill),
            'subscribe cut': (self.subscribing, self.subscribing.cut),
        }
        if plan.fault in acts:
            proxy, act = acts[plan.fault]
            # What comes by memory has few bytes.
            size_bytes = _SHARED_BYTES if plan.is_sharing else plan.size_bytes
            proxy.arm(int(plan.at * size_bytes), lambda: (self._count(plan.fault), act()))

    def _count(self, fault: str) -> None:
        self.report.deaths[fault] = self.report.deaths.get(fault, 0) + 1

    async def _publish(self, plan: Plan) -> None:
        """Order the version until it is answered, whoever dies meanwhile."""
        answer: dict[str, Any] = {}
        while 'digest' not in answer:
            await self.trainer.ensure(is_sharing=plan.is_sharing)
            self.trainer.send(plan.order)
            answer = await self.trainer.told() or {}
        if answer['digest'] != self._expected[plan.order.version]:
            self.report.note(plan.seed, f'answered with another digest: {answer}')
        self._answered.append(plan.order)

    async def _receive(self, plan: Plan) -> int:
        """Take what arrives until the version has, whoever dies meanwhile; return the bytes of what arrived."""
        wanted_bytes = 0
        while self._arrived < plan.order.version:
            told = await self.sampler.told()
            if told is None:
                await self.sampler.ensure(is_sharing=plan.is_sharing)
                self._arrived = 0
                continue
            arrival = Arrival(**told)
            wanted_bytes += arrival.wire_size_bytes
            self.report.arrivals[arrival.encoding] = self.report.arrivals.get(arrival.encoding, 0) + 1
            if arrival.digest != self._expected.get(arrival.version):
                self.report.note(plan.seed, f'a mixed or unknown state arrived: {arrival}')
            if arrival.version <= self._arrived:
                self.report.note(plan.seed, f'version {arrival.version} came after {self._arrived}')
            self._arrived = arrival.version
        return wanted_bytes

    def _note_sent_again(self, plan: Plan, extra_bytes: int) -> None:
        """See what a cut cost: the transfer goes on where it was, not at its beginning."""
        if plan.fault == 'subscribe cut':
            self.report.cut_at_bytes += int(plan.at * plan.size_bytes)
            self.report.sent_again_bytes += max(extra_bytes, 0)
            if extra_bytes > _SENT_AGAIN_BYTES:
                self.report.note(plan.seed, f'{extra_bytes} bytes were sent again after one cut')

    async def _check_kept(self, seed: int) -> None:
        """See that the ring and every pinned version are there, bit for bit."""
        kept = {order for order in self._answered if order.is_pinned} | set(self._answered[-1:])
        kept |= set([order for order in self._answered if not order.is_pinned][-_RING_CAPACITY:])
        async with open_channel(self.service.address) as channel:
            with acting_for(ALICE):
                client = WeightClient(channel)
                for order in kept:
                    await self._check_one(client, seed, order)

    async def _check_one(self, client: WeightClient, seed: int, order: Order) -> None:
        try:
            received = await client.fetch_version(ADAPTER_ID, order.version)
        except DomainError as error:
            self.report.note(seed, f'version {order.version} was answered and is lost: {error}')
            return
        if state_digest(received.state.data) != self._expected[order.version]:
            self.report.note(seed, f'version {order.version} has another state now')

    async def _end(self, seed: int) -> None:
        """End everything; what the killed ones left in shared memory is gone with the next process that looks."""
        await self.trainer.end()
        await self.sampler.end()
        await self.publishing.stop()
        await self.subscribing.stop()
        await self.service.stop()
        *killed, asked = self.service.statuses
        if asked or any(status != -signal.SIGKILL for status in killed):
            self.report.note(seed, f'the service ended by itself: {self.service.statuses}')
        Segments(self.memory)
        left = sorted(path.name for path in self.memory.iterdir() if path.name != 'host')
        if [name for name in left if not name.startswith('owner-')]:
            self.report.note(seed, f'left in shared memory: {left}')
