"""A tenant that runs plans with the SDK's sequence numbers, streams and retries."""

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

_RETRY_TIMEOUT = timedelta(seconds=300)
"""Retry timeout, which is far longer than a start of the service. An error after this time is a violation."""


class Tenant:
    """Client of one tenant.

    Args:
        name: Name of the tenant, used as its API key.
        address: Address of the proxy.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._connection = Connection(Address.parse(address), api_key=name, retry_timeout=_RETRY_TIMEOUT)
        self._stub = AdapterServiceStub(self._connection.channel)

    async def run_plan(self, plan: AdapterPlan) -> tuple[str, Observation]:
        """Run a plan; return the id of its adapter and the observation."""
        return await self._on_loop(_AdapterRun(self._connection, self._stub, plan).run())

    async def adapter_ids(self) -> list[str]:
        """Return the sorted ids of the tenant's adapters."""
        request = adapter_service_pb2.ListAdaptersRequest(page_size=1000)
        response = await self._on_loop(self._connection.unary(self._stub.ListAdapters, request))
        return sorted(adapter.adapter_id for adapter in response.adapters)

    async def delete(self, adapter_id: str) -> None:
        """Delete an adapter, which may already be deleted if the response to an earlier attempt was lost."""
        request = adapter_service_pb2.DeleteAdapterRequest(adapter_id=adapter_id)
        try:
            await self._on_loop(self._connection.unary(self._stub.DeleteAdapter, request))
        except NotFoundError:
            return

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    async def _on_loop(self, coroutine: Any) -> Any:
        return await asyncio.wrap_future(self._connection.loop_thread.submit(coroutine))


@dataclass
class _AdapterRun:
    """Execution of one plan, on the event loop of the connection."""

    connection: Connection
    stub: AdapterServiceStub
    plan: AdapterPlan
    _paths: dict[str, str] = field(default_factory=dict[str, str])
    _folders: dict[str, Path] = field(default_factory=dict[str, Path])

    async def run(self) -> tuple[str, Observation]:
        adapter_id, observation = '', Observation()
        try:
            adapter_id = (await self._create()).adapter_id
            self._log = OperationLog(self.connection, adapter_id, last_number=0)
            for segment in self.plan.segments:
                observation.responses += await self._run_segment(segment)
            observation.final = self._final_state(adapter_id, await self._create())
        except Error as error:
            observation.responses.append(describe_error('create_adapter', error))
        return adapter_id, observation

    def _final_state(self, adapter_id: str, recreated: adapter_pb2.Adapter) -> dict[str, str]:
        folder = self._folders.get(FINAL_SAVE)
        return {
            'repeated creation': 'the same adapter' if recreated.adapter_id == adapter_id else 'another adapter',
            **describe_adapter(recreated),
            **(describe_folder(folder) if folder is not None else {}),
        }

    async def _create(self) -> adapter_pb2.Adapter:
        return (await self.connection.unary(self.stub.CreateAdapter, self.plan.creation)).adapter

    async def _run_segment(self, segment: Segment) -> list[str]:
        if not segment.is_streamed:
            return [await self._run_verb(verb) for verb in segment.verbs]
        stream = StreamSender(self.connection)
        self._log.sender = stream
        try:
            return await asyncio.gather(*(self._run_verb(verb) for verb in segment.verbs))
        finally:
            self._log.sender = UnarySender(self.connection)
            await stream.close()

    async def _run_verb(self, planned: PlannedVerb) -> str:
        message = planned.message
        if planned.loaded_checkpoint:
            message = type(message)()
            message.CopyFrom(planned.message)
            message.checkpoint_path = self._paths.get(planned.loaded_checkpoint, 'twinkle://lost/weights/lost')
        try:
            result = await self._log.run(**{planned.name: message})
        except Error as error:
            return describe_error(planned.name, error)
        if planned.name == 'save':
            self._record_save(planned.message.name, result)
        return describe_result(planned.name, result)

    def _record_save(self, name: str, result: operation_result_pb2.OperationResult) -> None:
        self._paths[name] = result.save.checkpoint_path
        self._folders[name] = Path(result.save.folder)
