"""The client: a connection to a gateway, its session, and the gateway's catalogue.

All methods block. All except `close` also have an `.aio` form, which is a coroutine (`await
client.get_server_info.aio()`). Most results are messages of the contract, which documents their fields.
"""

import atexit
import sys
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from twinkle.api.checkpoint.v1 import checkpoint_pb2, checkpoint_service_pb2
from twinkle.api.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from twinkle.api.gateway.v1 import catalogue_service_pb2, session_service_pb2
from twinkle.api.gateway.v1.catalogue_service_pb2_grpc import CatalogueServiceStub
from twinkle.api.model.v1 import adapter_pb2, adapter_service_pb2, training_service_pb2
from twinkle.api.model.v1.adapter_service_pb2_grpc import AdapterServiceStub
from twinkle.api.model.v1.training_service_pb2_grpc import TrainingServiceStub
from twinkle.api.server.v1 import server_service_pb2
from twinkle.api.server.v1.server_service_pb2_grpc import ServerServiceStub
from twinkle_client.adapter_names import AdapterNames
from twinkle_client.archives import ArchiveDownload, ReportBytes, ignore_progress
from twinkle_client.endpoint import find_endpoint
from twinkle_client.errors import Error, NotFoundError, RetryableError
from twinkle_client.filters import PAGE_SIZE, CheckpointFilters, RunFilters, checkpoints_request, runs_request
from twinkle_client.rpc import Address, Connection, LoopThread, remote_method
from twinkle_client.rpc.connection import DEFAULT_RETRY_TIMEOUT
from twinkle_client.session import SessionKeeper

_CLIENT_NAME = 'twinkle_client 0.1.0'


class TwinkleClient:
    """A connection to a gateway. Call `close`, or use the client as a context manager; several clients may be open."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        session_heartbeat_interval: float | timedelta | None = None,
        retry_timeout: timedelta = DEFAULT_RETRY_TIMEOUT,
        ca: str | Path | None = None,
    ) -> None:
        """Create a client; the first call connects.

        Args:
            base_url: `http://host:port`, `https://...`, `grpc://...` or `host:port`. Unset: `TWINKLE_SERVER_URL`,
                or the local stack started by `twinkle up`.
            api_key: Unset or empty: `TWINKLE_API_KEY`, or the local stack's key.
            session_heartbeat_interval: Time between heartbeats, at most the gateway's interval; a number is in
                seconds. Unset: the gateway's interval.
            retry_timeout: Time for which calls are retried while the server is unavailable.
            ca: PEM file of CA certificates that verify a server with TLS. Unset: the local stack's CA if the address
                or the key is read from that stack, otherwise `TWINKLE_CA`, or the system's certificates.

        Raises:
            ValueError: No address was given or found, the address is malformed, or `ca` cannot be used.
        """
        endpoint = find_endpoint(base_url, api_key, str(ca or ''))
        seconds = session_heartbeat_interval
        self._heartbeat_interval = timedelta(seconds=seconds) if isinstance(seconds, int | float) else seconds
        self.connection = Connection(
            Address.parse(endpoint.address), api_key=endpoint.api_key, retry_timeout=retry_timeout, ca=endpoint.ca
        )
        self._server = ServerServiceStub(self.connection.channel)
        self._catalogue = CatalogueServiceStub(self.connection.channel)
        self._checkpoints = CheckpointServiceStub(self.connection.channel)
        self._adapters = AdapterServiceStub(self.connection.channel)
        self._training = TrainingServiceStub(self.connection.channel)
        self._session = SessionKeeper(self.connection, client=_CLIENT_NAME)
        self.adapter_names = AdapterNames()
        """Adapter names of the client's model handles."""
        self._is_closed = False
        _open_clients.add(self)

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self.connection.loop_thread

    @property
    def base_url(self) -> str:
        """Address of the gateway."""
        return str(self.connection.address)

    @property
    def session_id(self) -> str:
        """Id of the session; empty before `create_session`."""
        return self._session.session_id

    @remote_method
    async def create_session(self, *, project_id: str = '') -> session_service_pb2.Session:
        """Create a session and start its heartbeats. An earlier session of this client then expires.

        Args:
            project_id: Project of the session. Empty: the project of the API key, if any.

        Raises:
            NotFoundError: The project does not exist.
            AccessError: The API key is missing or unknown.
            RetryableError: No server responds at the address.
        """
        return await self._session.begin(interval=self._heartbeat_interval, project_id=project_id)

    @remote_method
    async def get_server_info(self) -> server_service_pb2.GetServerInfoResponse:
        """Return the server's services, methods, base models, component names and limits."""
        return await self.connection.unary(self._server.GetServerInfo, server_service_pb2.GetServerInfoRequest())

    @remote_method
    async def health_check(self) -> bool:
        """Return whether the gateway and all services behind it respond.

        Raises:
            AccessError: The API key is missing or unknown.
        """
        try:
            info = await self.connection.unary(
                self._server.GetServerInfo, server_service_pb2.GetServerInfoRequest(), deadline=timedelta(seconds=5)
            )
        except (RetryableError, TimeoutError):
            return False
        return all(service.is_reachable for service in info.services)

    @remote_method
    async def list_training_runs(self, **filters: Unpack[RunFilters]) -> list[catalogue_service_pb2.Run]:
        """Return the caller's runs, newest first.

        Args:
            filters: `base_model`, `session_id`, `user_metadata` and `is_active`, see `RunFilters`. A run must
                satisfy all of them.

        Raises:
            TypeError: A filter is unknown, or a label is not a string.
            UsageError: There are more than 16 labels.
        """
        runs: list[catalogue_service_pb2.Run] = []
        request = runs_request(filters)
        while True:
            page = await self.connection.unary(self._catalogue.ListRuns, request)
            runs += page.runs
            if not page.next_page_token:
                return runs
            request.page_token = page.next_page_token

    @remote_method
    async def get_training_run(self, run_id: str) -> catalogue_service_pb2.Run:
        """Return a run.

        Raises:
            NotFoundError: The run does not exist.
        """
        request = catalogue_service_pb2.GetRunRequest(run_id=run_id)
        return (await self.connection.unary(self._catalogue.GetRun, request)).run

    @remote_method
    async def list_adapters(self) -> list[adapter_pb2.Adapter]:
        """Return the caller's trainable adapters, newest first."""
        adapters: list[adapter_pb2.Adapter] = []
        request = adapter_service_pb2.ListAdaptersRequest(page_size=PAGE_SIZE)
        while True:
            page = await self.connection.unary(self._adapters.ListAdapters, request)
            adapters += page.adapters
            if not page.next_page_token:
                return adapters
            request.page_token = page.next_page_token

    @remote_method
    async def find_operation(
        self, adapter_id: str, sequence_number: int
    ) -> training_service_pb2.GetOperationResponse | None:
        """Return the status of an operation, or None if it was not accepted or is no longer on record."""
        request = training_service_pb2.GetOperationRequest(adapter_id=adapter_id, sequence_number=sequence_number)
        try:
            return await self.connection.unary(self._training.GetOperation, request)
        except NotFoundError:
            return None

    @remote_method
    async def list_checkpoints(
        self, run_id: str = '', **filters: Unpack[CheckpointFilters]
    ) -> list[checkpoint_pb2.Checkpoint]:
        """Return the caller's checkpoints, newest first.

        Args:
            run_id: Run of the checkpoints. Empty: all runs.
            filters: `base_model`, `is_optimizer_included`, `is_public`, `begin_time`, `end_time` and
                `user_metadata`, see `CheckpointFilters`. A checkpoint must satisfy all of them. Filtered lists come
                from the catalogue, which may not yet contain the newest checkpoints.

        Raises:
            TypeError: A filter is unknown, a label is not a string, or a time is not a datetime.
            ValueError: `end_time` is not later than `begin_time`.
            UsageError: There are more than 16 labels.
        """
        if filters:
            return await self._find_checkpoints(checkpoints_request(run_id, filters))
        return await self._list_checkpoints(run_id)

    async def _find_checkpoints(
        self, request: catalogue_service_pb2.ListRunCheckpointsRequest
    ) -> list[checkpoint_pb2.Checkpoint]:
        checkpoints: list[checkpoint_pb2.Checkpoint] = []
        while True:
            page = await self.connection.unary(self._catalogue.ListRunCheckpoints, request)
            checkpoints += page.checkpoints
            if not page.next_page_token:
                return checkpoints
            request.page_token = page.next_page_token

    async def _list_checkpoints(self, run_id: str) -> list[checkpoint_pb2.Checkpoint]:
        checkpoints: list[checkpoint_pb2.Checkpoint] = []
        request = checkpoint_service_pb2.ListCheckpointsRequest(adapter_id=run_id, page_size=PAGE_SIZE)
        while True:
            page = await self.connection.unary(self._checkpoints.ListCheckpoints, request)
            checkpoints += page.checkpoints
            if not page.next_page_token:
                return checkpoints
            request.page_token = page.next_page_token

    @remote_method
    async def get_checkpoint(self, path: str) -> checkpoint_pb2.Checkpoint:
        """Return a checkpoint's record, which contains its size, step count and digest.

        The record names the folder of the checkpoint only if the operator allows it, the store is a local disk and the
        caller owns the checkpoint.

        Raises:
            NotFoundError: There is no checkpoint at this path.
        """
        return await self._get_checkpoint(path)

    async def _get_checkpoint(self, path: str) -> checkpoint_pb2.Checkpoint:
        request = checkpoint_service_pb2.GetCheckpointRequest(checkpoint_path=path)
        return (await self.connection.unary(self._checkpoints.GetCheckpoint, request)).checkpoint

    @remote_method
    async def get_checkpoint_path(self, run_id: str, name: str) -> str:
        """Return the `twinkle://` path of a checkpoint.

        Raises:
            NotFoundError: The run has no checkpoint with this name.
        """
        return (await self._get_checkpoint(f'twinkle://{run_id}/weights/{name}')).path

    @remote_method
    async def get_latest_checkpoint_path(self, run_id: str) -> str | None:
        """Return the path of a run's newest checkpoint, or None if the run has no checkpoint."""
        checkpoints = await self._list_checkpoints(run_id)
        return checkpoints[0].path if checkpoints else None

    @remote_method
    async def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint.

        Raises:
            NotFoundError: There is no checkpoint at this path.
        """
        request = checkpoint_service_pb2.DeleteCheckpointRequest(checkpoint_path=path)
        await self.connection.unary(self._checkpoints.DeleteCheckpoint, request)

    @remote_method
    async def download_checkpoint(
        self, path: str, folder: str | Path, *, report: ReportBytes = ignore_progress
    ) -> Path:
        """Download a checkpoint as a peft folder.

        An interrupted download, even of an earlier program, resumes when the call is repeated.

        Args:
            path: `twinkle://<run>/weights/<name>`.
            folder: Target folder; created if necessary.
            report: Callback with the number of received bytes and the total.

        Returns:
            The folder.

        Raises:
            NotFoundError: There is no checkpoint at this path.
            ValueError: The archive was damaged or replaced repeatedly.
        """
        await ArchiveDownload(self.connection, path, Path(folder), report=report).run()
        return Path(folder)

    def close(self) -> None:
        """Finish the session with success and close the connection; closing again does nothing.

        The server does not save training steps at the end of a successful session. If an exception leaves the block of
        the context manager, the session finishes without success, and the server saves unsaved steps in checkpoints.
        """
        self._close(session_service_pb2.FINISH_REASON_SUCCESS)

    def _close(self, reason: session_service_pb2.FinishReason.ValueType) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(Error, RuntimeError):
            self.loop_thread.run(self._session.end(reason))
        self.connection.close()

    def __enter__(self) -> Self:
        if not self.session_id:
            self.create_session()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(_finish_reason(kind))

    async def __aenter__(self) -> Self:
        if not self.session_id:
            await self.create_session.aio()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Closing blocks only briefly, so it needs no asynchronous form.
        self._close(_finish_reason(kind))


_open_clients: weakref.WeakSet[TwinkleClient] = weakref.WeakSet()
_current: list[TwinkleClient] = []


def init_twinkle_client(
    base_url: str | None = None,
    api_key: str | None = None,
    *,
    session_heartbeat_interval: float | timedelta | None = None,
    retry_timeout: timedelta = DEFAULT_RETRY_TIMEOUT,
    ca: str | Path | None = None,
) -> TwinkleClient:
    """Connect, create a session, and make this client the default of all components.

    The session finishes with success when the program exits. If an exception ends the program, the session finishes
    without success, and the server saves unsaved steps in checkpoints; see `TwinkleClient.close`.

    Args:
        base_url: See `TwinkleClient`.
        api_key: See `TwinkleClient`.
        session_heartbeat_interval: See `TwinkleClient`.
        retry_timeout: See `TwinkleClient`.
        ca: See `TwinkleClient`.

    Raises:
        ValueError: No address was given or found, the address is malformed, or `ca` cannot be used.
        AccessError: The API key is missing or unknown.
        RetryableError: No server responds at the address.
    """
    client = TwinkleClient(
        base_url, api_key, session_heartbeat_interval=session_heartbeat_interval, retry_timeout=retry_timeout, ca=ca
    )
    try:
        client.create_session()
    except BaseException:
        client.close()
        raise
    _current[:] = [client]
    return client


def current_client(client: TwinkleClient | None = None) -> TwinkleClient:
    """Return `client` if given, otherwise the client that `init_twinkle_client` created last.

    Raises:
        RuntimeError: There is no client.
    """
    if client is not None:
        return client
    if not _current:
        raise RuntimeError('there is no client; call init_twinkle_client() first, or pass client=')
    return _current[0]


def _finish_reason(kind: type[BaseException] | None) -> session_service_pb2.FinishReason.ValueType:
    if kind is None:
        return session_service_pb2.FINISH_REASON_SUCCESS
    if issubclass(kind, KeyboardInterrupt):
        return session_service_pb2.FINISH_REASON_INTERRUPTED
    return session_service_pb2.FINISH_REASON_FAILED


@atexit.register
def _close_all() -> None:
    # Python sets `sys.last_value` when it prints an exception that the program did not catch.
    error: BaseException | None = getattr(sys, 'last_value', None)
    for client in list(_open_clients):
        client.__exit__(None if error is None else type(error), error, None)
