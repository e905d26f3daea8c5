"""Creates adapters. Requests with the same request id create one adapter."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from twinkle.data_format import LoraConfig
from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import BaseModelNotFound, InvalidField, QuotaExceeded, RequestIdReused
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.worker import completed
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.residency import Residency
from twinkle_services.model.application.state_verbs import check_kind
from twinkle_services.model.domain.adapter import MAX_CREATIONS, Adapter, CreationRecord
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.errors import AdapterIdTaken, CreationCrashed, ReplicaLeased
from twinkle_services.model.domain.training_config import TrainingConfig
from twinkle_services.model.ports import Ports


@dataclass(frozen=True, kw_only=True)
class CreateAdapterRequest:
    """Request for a new adapter."""

    request_id: str
    base_model: str
    lora_config: LoraConfig | None
    """LoRA configuration; None for the checkpoint's configuration, or for the defaults if there is no checkpoint."""
    training_config: TrainingConfig
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    checkpoint_path: str = ''
    is_optimizer_included: bool = False
    full_parameters: tuple[str, ...] | None = None
    """Names of the base model's parameters to train, or an empty tuple to train all; None for a LoRA adapter."""
    adapter_id: str = ''
    """Id chosen by the gateway; empty to generate one."""
    session_id: str = ''
    """Id of the caller's session; empty without a session."""
    adapters_limit: int | None = None
    """The tenant's quota of adapters; set only if the quota is exhausted, and not part of the fingerprint."""
    fingerprint: str = ''


@dataclass(frozen=True, kw_only=True)
class AdapterLimits:
    """Maximum numbers of adapters, resident or not."""

    tenant: int
    """Limit per tenant."""
    total: int
    """Limit for all tenants together."""


class CreateAdapter:
    """Creates adapters with fresh weights or from a checkpoint."""

    def __init__(
        self,
        ports: Ports,
        directory: AdapterDirectory,
        residency: Residency,
        *,
        max_lora_rank: int,
        limits: AdapterLimits,
    ) -> None:
        self._ports = ports
        self._directory = directory
        self._residency = residency
        self._max_lora_rank = max_lora_rank
        self._limits = limits
        self._requests: OrderedDict[tuple[str, str], CreationRecord] = OrderedDict()
        self._warnings: dict[str, tuple[str, ...]] = {}
        self._creation_lock = asyncio.Lock()
        self._request_locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def remember(self, creations: Iterable[CreationRecord]) -> None:
        """Register earlier requests, oldest first, so that a repeat returns the same adapter.

        If there are more than `MAX_CREATIONS`, the oldest ones are forgotten.
        """
        for creation in creations:
            self._requests[creation.tenant_id, creation.request_id] = creation
        while len(self._requests) > MAX_CREATIONS:
            _, oldest = self._requests.popitem(last=False)
            self._warnings.pop(oldest.adapter_id, None)

    def warnings_of(self, adapter_id: str) -> tuple[str, ...]:
        """Return the warnings of an adapter's creation; they are lost when the process exits."""
        return self._warnings.get(adapter_id, ())

    async def __call__(self, caller: Caller, request: CreateAdapterRequest) -> Adapter:
        """Create an adapter; a repeated request returns the same adapter in its current state.

        Cancellation: a creation that has started completes; repeating the request returns its adapter.

        Raises:
            ScopeMissing: The API key lacks the scope `train`, or `full_parameters` for a full-parameter adapter.
            BaseModelNotFound: This replica does not serve the base model.
            CheckpointNotFound, CheckpointDamaged, ServiceUnreachable: The checkpoint cannot be read; see `WeightStore`
                for the classes of these errors.
            InvalidField, UnknownComponent: The configuration is invalid, or a client chose the id.
            QuotaExceeded: The tenant or the replica has reached its limit of adapters.
            ReplicaLeased: A full-parameter adapter uses the replica exclusively.
            ReplicaInUse, FullParametersDisabled: The replica cannot be leased to the full-parameter adapter.
            JournalUnavailable: The adapter could not be made durable and does not exist.
            RequestIdReused: The request id was used with different content.
            AdapterIdTaken: The chosen id was used before.
            AdapterNotFound, AdapterExpired, AdapterDamaged: The request is a repeat, and its adapter was deleted, was
                removed because it was unused, or is damaged.
            CreationCrashed: The process ended during each of several attempts.
        """
        require_scope(caller, 'train')
        if request.full_parameters is not None:
            require_scope(caller, 'full_parameters')
        if request.adapter_id and not caller.is_internal:
            # AdapterIdTaken would reveal ids of other tenants to a client.
            raise InvalidField('adapter_id', 'must be empty: the service chooses the id')
        key = (caller.tenant_id, request.request_id)
        async with self._request_locks.setdefault(key, asyncio.Lock()):
            known = self._requests.get(key) or await self._creation_of(request.adapter_id)
            if known is not None:
                if (known.tenant_id, known.request_id) != key:
                    raise AdapterIdTaken(request.adapter_id)
                if known.fingerprint != request.fingerprint:
                    raise RequestIdReused(request.request_id)
                return self._directory.get(caller, known.adapter_id)
            self._check(caller.tenant_id, request)
            # Fetching the checkpoint may take a long time, so it runs outside the lock.
            state = await self._starting_state(request)
            async with self._creation_lock:
                if await self._creation_of(request.adapter_id) is not None:
                    raise AdapterIdTaken(request.adapter_id)
                # The creation completes even if the caller disconnects; a repeated request then returns its outcome.
                return await completed(self._create(caller, request, state))

    async def _create(self, caller: Caller, request: CreateAdapterRequest, state: AdapterState | None) -> Adapter:
        self._check(caller.tenant_id, request)
        lora_config = request.lora_config or (state.lora_config if state else LoraConfig())
        self._check_rank(lora_config)
        adapter_id = request.adapter_id or new_id('ad')
        creation = CreationRecord(
            tenant_id=caller.tenant_id,
            request_id=request.request_id,
            fingerprint=request.fingerprint,
            adapter_id=adapter_id,
        )
        # A creation that only waits for a slot did not cause a crash, and is not counted.
        attempt = self._residency.attempts.counted(
            f'creation of {request.request_id} by {caller.tenant_id}', refusal=CreationCrashed()
        )
        async with self._leased(request, adapter_id), self._residency.reserve(adapter_id), attempt:
            with self._residency.short_work.begin():
                adapter, warnings = await self._make(caller, request, adapter_id, lora_config)
                # The journal stores the requested configuration; the engine's configuration includes the defaults.
                origin = replace(adapter, training_config=request.training_config)
                if state is not None:
                    is_included = request.is_optimizer_included
                    adapter = await self._load_checkpoint(adapter, state, is_trainer_included=is_included)
                initial_state = None if state is None else await self._ports.backend.snapshot(adapter_id)
            await self._ports.journal.add_adapter(adapter, creation, origin=origin, state=initial_state)
        self._directory.put(adapter)
        self.remember([creation])
        if warnings:
            self._warnings[adapter_id] = warnings
        return adapter

    async def _make(
        self, caller: Caller, request: CreateAdapterRequest, adapter_id: str, lora_config: LoraConfig
    ) -> tuple[Adapter, tuple[str, ...]]:
        """Create the adapter in the engine, and return it with the warnings for its owner."""
        description = await self._ports.backend.create_adapter(
            adapter_id, lora_config, request.training_config, full_parameters=request.full_parameters
        )
        now = self._ports.clock.now()
        adapter = Adapter(
            adapter_id=adapter_id,
            tenant_id=caller.tenant_id,
            base_model=request.base_model,
            lora_config=description.lora_config,
            training_config=description.training_config,
            parameter_count=description.parameter_count,
            full_parameters=request.full_parameters,
            has_lease=request.full_parameters is not None,
            create_time=now,
            update_time=now,
            user_metadata=request.user_metadata,
            session_id=request.session_id,
            checkpoint_path=request.checkpoint_path,
        )
        return adapter, description.warnings

    def _check(self, tenant_id: str, request: CreateAdapterRequest) -> None:
        known = tuple(model.base_model for model in self._ports.backend.facts().base_models)
        if request.base_model not in known:
            raise BaseModelNotFound(request.base_model, known)
        if request.adapters_limit is not None:
            raise QuotaExceeded(quota='max_adapters', limit=request.adapters_limit)
        if self._directory.count_of(tenant_id) >= self._limits.tenant:
            raise QuotaExceeded(quota='adapters', limit=self._limits.tenant)
        if len(self._directory) >= self._limits.total:
            raise QuotaExceeded(quota='adapters', limit=self._limits.total)
        if self._residency.lease.holder_id is not None:
            raise ReplicaLeased()

    @asynccontextmanager
    async def _leased(self, request: CreateAdapterRequest, adapter_id: str) -> AsyncIterator[None]:
        """Lease the replica to a full-parameter adapter, and release the lease if the block fails."""
        if request.full_parameters is None:
            yield
            return
        self._residency.take_lease(adapter_id)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                await self._residency.forget(adapter_id)

    async def _creation_of(self, adapter_id: str) -> CreationRecord | None:
        """Return the earlier creation with an id that the caller chose; None for an empty or unused id."""
        return await self._ports.journal.creation_of(adapter_id) if adapter_id else None

    def _check_rank(self, lora_config: LoraConfig) -> None:
        highest = max([lora_config.r, *lora_config.rank_pattern.values()])
        if highest > self._max_lora_rank:
            raise InvalidField('lora_config.lora_rank', f'must be at most {self._max_lora_rank}, got {highest}')

    async def _starting_state(self, request: CreateAdapterRequest) -> AdapterState | None:
        if not request.checkpoint_path:
            return None
        state = await self._ports.store.fetch(
            request.checkpoint_path, is_trainer_included=request.is_optimizer_included
        )
        check_kind(state, is_full_parameter=request.full_parameters is not None)
        return state

    async def _load_checkpoint(self, adapter: Adapter, state: AdapterState, *, is_trainer_included: bool) -> Adapter:
        run = await self._ports.backend.import_state(adapter.adapter_id, state, is_trainer_included=is_trainer_included)
        config = run.training_config or adapter.training_config
        return replace(adapter, step_count=run.step_count or 0, training_config=config)
