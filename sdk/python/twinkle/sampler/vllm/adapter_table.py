"""The adapter versions of an engine, with the number of requests that use each.

vLLM crashes if a request names an unknown adapter. A request is therefore submitted only with a version that every
worker has confirmed, and a version is removed only when no request uses it.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from itertools import count
from typing import Any

from vllm.lora.request import LoRARequest

from twinkle.sampler.errors import AdapterDoesNotFit, UnknownAdapter
from twinkle.sampler.vllm.adapter_slots import VllmAdapter
from twinkle.sampler.vllm.core import VllmCore
from twinkle.sampler.vllm.handover import AdapterSource, in_memory_file, layout_of

_UNUSED_PATH = '/nonexistent/twinkle-adapter'
"""Path that is passed to vLLM, which requires one. It does not exist, so an attempt to read it fails."""


class AdapterTable:
    """The adapter versions of one engine."""

    def __init__(self, core: VllmCore) -> None:
        self._core = core
        self._requests: dict[int, LoRARequest] = {}
        self._users: Counter[int] = Counter()
        self._retired: set[int] = set()
        self._ids = count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, key: str, version: int, source: AdapterSource) -> VllmAdapter:
        """Load a version into every worker, from memory. Running requests continue.

        Raises:
            AdapterDoesNotFit: the version does not fit the model, and is not loaded.
            EngineFailed: the engine has failed.
        """
        # The id is never reused and is part of the name, so cached prefixes always belong to one version.
        adapter = VllmAdapter(key, version, next(self._ids))
        sending = asyncio.create_task(self._send(adapter, source))
        try:
            problems = await asyncio.shield(sending)
        except asyncio.CancelledError:
            # The workers are still loading the version, so it can be removed only when they have finished.
            self._run_in_background(self._remove_when_sent(adapter, sending))
            raise
        if any(problems):
            await self._core.call_workers('twinkle_remove_adapter', adapter.lora_id)
            raise AdapterDoesNotFit(next(filter(None, problems)))
        name = f'{key}@{version}#{adapter.lora_id}'
        self._requests[adapter.lora_id] = LoRARequest(name, adapter.lora_id, _UNUSED_PATH)
        return adapter

    async def _send(self, adapter: VllmAdapter, source: AdapterSource) -> list[str]:
        layout = layout_of(source.tensors, source.config)
        with in_memory_file(source.tensors, segment_path=source.segment_path) as path:
            return await self._core.call_workers('twinkle_add_adapter', adapter.lora_id, path, layout)

    async def _remove_when_sent(self, adapter: VllmAdapter, sending: 'asyncio.Task[list[str]]') -> None:
        await asyncio.wait({sending})
        if not self._core.is_failed:
            await self._core.call_workers('twinkle_remove_adapter', adapter.lora_id)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def remove(self, adapter: VllmAdapter) -> None:
        """Remove a version, immediately or after its last request. Unknown versions are ignored."""
        if adapter.lora_id not in self._requests:
            return
        if self._users[adapter.lora_id]:
            self._retired.add(adapter.lora_id)
            return
        self._retired.discard(adapter.lora_id)
        del self._requests[adapter.lora_id]
        if not self._core.is_failed:
            await self._core.call_workers('twinkle_remove_adapter', adapter.lora_id)

    def acquire(self, adapter: VllmAdapter) -> None:
        """Prevent the removal of a version until `release` is called.

        Raises:
            UnknownAdapter: the engine does not have the version, or is removing it.
        """
        if adapter.lora_id not in self._requests or adapter.lora_id in self._retired:
            known = sorted(request.lora_name for request in self._requests.values())
            raise UnknownAdapter(f'{adapter.key}@{adapter.version}', known)
        self._users[adapter.lora_id] += 1

    async def release(self, adapter: VllmAdapter) -> None:
        """Undo `acquire`. If `remove` was called since then, the last release removes the version."""
        self._users[adapter.lora_id] -= 1
        if not self._users[adapter.lora_id]:
            del self._users[adapter.lora_id]
            if adapter.lora_id in self._retired:
                await self.remove(adapter)

    def request_of(self, adapter: VllmAdapter | None) -> LoRARequest | None:
        """Return vLLM's request object of an acquired version, or None for the base model."""
        return None if adapter is None else self._requests[adapter.lora_id]
