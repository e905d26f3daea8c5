"""A tenant's client: it carries out plans through the SDK's own numbering, streams and retries."""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from e2e.faults.observation import Observation, describe_adapter, describe_error, describe_folder, describe_result
from e2e.faults.workload import FINAL_SAVE, AdapterPlan, PlannedVerb, Segment
from twinkle.api.model.v1 import adapter_pb2, adapter_service_pb2, operation_result_pb2
from twinkle.api.model.v1.adapter_service_pb2_grpc import AdapterServiceStub
from twinkle_client import Error, NotFoundError
from twinkle_client.model.operations import OperationLog
from twinkle_client.model.senders import StreamSender, UnarySender
from twinkle_client.rpc import Connection
from twinkle_client.rpc.address import Address

_PATIENCE = timedelta(seconds=120)
"""Far longer than a start of the service takes: an error after it is a violation."""


class Tenant:
    """Calls the service as one tenant."""

    def __init__(self, name: str, address: str) -> None:
        """Connect through `address`."""
        self.name = name
        self._connection = Connection(Address.parse(address), api_key=name, retry_timeout=_PATIENCE)
        self._stub = AdapterServiceStub(self._connection.channel)

    async def carry_out(self, plan: AdapterPlan) -> tuple[str, Observation]:
        """Carry a plan out; return the adapter's id and what was seen."""
        return await self._on_loop(_Life(self._connection, self._stub, plan).run())

    async def adapter_ids(self) -> list[str]:
        """Return the ids of every adapter it has."""
        request = adapter_service_pb2.ListAdaptersRequest(page_size=1000)
        response = await self._on_loop(self._connection.unary(self._stub.ListAdapters, request))
        return sorted(adapter.adapter_id for adapter in response.adapters)

    async def delete(self, adapter_id: str) -> None:
        """Delete an adapter; an answer may have been lost, so one that is gone already will do."""
        request = adapter_service_pb2.DeleteAdapterRequest(adapter_id=adapter_id)
        try:
            await self._on_loop(self._connection.unary(self._stub.DeleteAdapter, request))
        except NotFoundError:
            return

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    async def _on_loop(self, coroutine: Any) -> Any:
        return await asyncio.wrap_future(self._connection.loop_thread.submit(coroutine))


@dataclass
class _Life:
    """One adapter's life; on the connection's loop."""

    connection: Connection
    stub: AdapterServiceStub
    plan: AdapterPlan
    _paths: dict[str, str] = field(default_factory=dict[str, str])
    _folders: dict[str, Path] = field(default_factory=dict[str, Path])

    async def run(self) -> tuple[str, Observation]:
        adapter_id, seen = '', Observation()
        try:
            adapter_id = (await self._create()).adapter_id
            self._log = OperationLog(self.connection, adapter_id, last_number=0)
            for segment in self.plan.segments:
                seen.answers += await self._carry_out(segment)
            seen.final = self._last_facts(adapter_id, await self._create())
        except Error as error:
            seen.answers.append(describe_error('create_adapter', error))
        return adapter_id, seen

    def _last_facts(self, adapter_id: str, again: adapter_pb2.Adapter) -> dict[str, str]:
        folder = self._folders.get(FINAL_SAVE)
        return {
            'created again': 'the same adapter' if again.adapter_id == adapter_id else 'another adapter',
            **describe_adapter(again),
            **(describe_folder(folder) if folder is not None else {}),
        }

    async def _create(self) -> adapter_pb2.Adapter:
        return (await self.connection.unary(self.stub.CreateAdapter, self.plan.creation)).adapter

    async def _carry_out(self, segment: Segment) -> list[str]:
        if not segment.is_streamed:
            return [await self._one(verb) for verb in segment.verbs]
        stream = StreamSender(self.connection)
        self._log.sender = stream
        try:
            return await asyncio.gather(*(self._one(verb) for verb in segment.verbs))
        finally:
            self._log.sender = UnarySender(self.connection)
            await stream.close()

    async def _one(self, planned: PlannedVerb) -> str:
        message = planned.message
        if planned.loads:
            message = type(message)()
            message.CopyFrom(planned.message)
            message.checkpoint_path = self._paths.get(planned.loads, 'twinkle://lost/weights/lost')
        try:
            result = await self._log.run(**{planned.name: message})
        except Error as error:
            return describe_error(planned.name, error)
        if planned.name == 'save':
            self._note_save(planned.message.name, result)
        return describe_result(planned.name, result)

    def _note_save(self, name: str, result: operation_result_pb2.OperationResult) -> None:
        self._paths[name] = result.save.checkpoint_path
        self._folders[name] = Path(result.save.folder)
