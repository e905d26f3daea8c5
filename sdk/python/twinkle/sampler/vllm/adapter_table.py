"""Which adapter versions an engine has, and who uses them.

vLLM dies when a request names an adapter it does not have. So a request is given to it only with a
version that every worker has confirmed, and a version leaves only when nobody uses it.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from itertools import count
from typing import Any

from vllm.lora.request import LoRARequest

from twinkle.sampler.errors import AdapterDoesNotFit, UnknownAdapter
from twinkle.sampler.vllm.adapters import VllmAdapter
from twinkle.sampler.vllm.core import VllmCore
from twinkle.sampler.vllm.handover import AdapterSource, in_memory_file, layout_of

_NOWHERE = '/twinkle/weights/came/from/memory'
"""vLLM wants a path of every adapter; were it ever read, loading would fail and not find other weights."""


class AdapterTable:
    """The versions of one engine."""

    def __init__(self, core: VllmCore) -> None:
        """Begin with none."""
        self._core = core
        self._requests: dict[int, LoRARequest] = {}
        self._users: Counter[int] = Counter()
        self._retired: set[int] = set()
        self._ids = count(1)
        self._work: set[asyncio.Task[None]] = set()

    async def add(self, key: str, version: int, source: AdapterSource) -> VllmAdapter:
        """Give a version to every worker, from memory; running requests go on between two steps.

        Raises:
            AdapterDoesNotFit: nothing of it stays.
            EngineFailed: the engine is broken.
        """
        # A number is never used twice, and it is in the name: cached prefixes belong to one version for ever.
        adapter = VllmAdapter(key, version, next(self._ids))
        sending = asyncio.create_task(self._send(adapter, source))
        try:
            problems = await asyncio.shield(sending)
        except asyncio.CancelledError:
            # The workers take it all the same, and nobody would ever remove it.
            self._keep(self._take_back(adapter, sending))
            raise
        if any(problems):
            await self._core.everywhere('twinkle_remove_adapter', adapter.lora_id)
            raise AdapterDoesNotFit(next(filter(None, problems)))
        name = f'{key}@{version}#{adapter.lora_id}'
        self._requests[adapter.lora_id] = LoRARequest(name, adapter.lora_id, _NOWHERE)
        return adapter

    async def _send(self, adapter: VllmAdapter, source: AdapterSource) -> list[str]:
        layout = layout_of(source.tensors, source.config)
        with in_memory_file(source.tensors, segment_path=source.segment_path) as path:
            return await self._core.everywhere('twinkle_add_adapter', adapter.lora_id, path, layout)

    async def _take_back(self, adapter: VllmAdapter, sending: 'asyncio.Task[list[str]]') -> None:
        await asyncio.wait({sending})
        if not self._core.is_failed:
            await self._core.everywhere('twinkle_remove_adapter', adapter.lora_id)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def remove(self, adapter: VllmAdapter) -> None:
        """Forget a version: at once, or when its last user has left. Unknown ones are no error."""
        if adapter.lora_id not in self._requests:
            return
        if self._users[adapter.lora_id]:
            self._retired.add(adapter.lora_id)
            return
        self._retired.discard(adapter.lora_id)
        del self._requests[adapter.lora_id]
        if not self._core.is_failed:
            await self._core.everywhere('twinkle_remove_adapter', adapter.lora_id)

    def acquire(self, adapter: VllmAdapter) -> None:
        """Keep a version until it is released.

        Raises:
            UnknownAdapter: this engine does not have it, or it is on its way out.
        """
        if adapter.lora_id not in self._requests or adapter.lora_id in self._retired:
            known = sorted(request.lora_name for request in self._requests.values())
            raise UnknownAdapter(f'{adapter.key}@{adapter.version}', known)
        self._users[adapter.lora_id] += 1

    async def release(self, adapter: VllmAdapter) -> None:
        """Give a version back; the last user of a retired one ends it."""
        self._users[adapter.lora_id] -= 1
        if not self._users[adapter.lora_id]:
            del self._users[adapter.lora_id]
            if adapter.lora_id in self._retired:
                await self.remove(adapter)

    def request_of(self, adapter: VllmAdapter | None) -> LoRARequest | None:
        """Return how vLLM is told of a version that is acquired; None for the base model."""
        return None if adapter is None else self._requests[adapter.lora_id]
