"""Routes that list runs and checkpoints, and that delete, publish, expire and copy checkpoints."""

from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from twinkle_services.gateway.catalogue.checkpoints import Checkpoints
from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints, run_from_proto
from twinkle_services.gateway.catalogue.paths import WeightsKind, path_of_native
from twinkle_services.gateway.catalogue.rules import Checkpoint, Run
from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.catalogue.sql import SqlBrowser
from twinkle_services.gateway.errors import RunNotFound
from twinkle_services.gateway.fleet.model_routes import shown_name
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.http.validation import not_served
from twinkle_services.gateway.paging import Counted, Slice
from twinkle_services.gateway.sessions.sessions import Sessions
from twinkle_services.gateway.tinker.bodies import (
    Counter,
    TinkerModel,
    WeightsPathField,
    labels_to_json,
    read_body,
    time_to_json,
)
from twinkle_services.gateway.tinker.routes import (
    CATALOGUE,
    CHECKPOINT_PATH,
    CHECKPOINTS,
    checked_query_of,
    path_of,
    slice_of,
    tinker_route,
)
from twinkle_services.gateway.tinker.submission import model_id_of
from twinkle_services.kit.errors import DomainError, InvalidField
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import text_from_proto

_KEY_LENGTH = 256
_ACCESS_TOKEN = 'x-tinker-weights-access-token'  # noqa: S105 - the name of a header
"""Header in which the SDK sends a token for weights of another account; old versions may send it in the body."""
_NO_TOKENS = 'is not supported; weights of another account can be copied once they are published'
_TYPES = {WeightsKind.TRAINING: 'training', WeightsKind.SAMPLER: 'sampler', WeightsKind.EXTERNAL: 'external'}


class RunRoutes:
    """Routes that list runs and checkpoints."""

    def __init__(self, browser: SqlBrowser, client: GrpcCheckpoints, *, runs: Runs, lookups: GrpcLookups) -> None:
        """Create the routes; `client` and `lookups` find checkpoints and models that are not in the catalogue yet."""
        self._browser = browser
        self._client = client
        self._runs = runs
        self._lookups = lookups

    def routes(self) -> list[Route]:
        rows = (
            ('training_runs', self._list_runs),
            ('training_runs/{run_id}', self._show_run),
            ('training_runs/{run_id}/checkpoints', self._list_run_checkpoints),
            ('checkpoints', self._list_checkpoints),
        )
        return [tinker_route(path, serve, access=CATALOGUE, http_method='GET') for path, serve in rows]

    async def _list_runs(self, call: HttpCall) -> Response:
        query = checked_query_of(call)
        part, tenant_id = slice_of(query, limit=20), current_caller().tenant_id
        found = await self._browser.runs(tenant_id, part, project_id=query.get('project_id', ''))
        checkpoints = await self._browser.checkpoints_of(tenant_id, [run.run_id for run in found.items])
        runs = [run_to_json(run, (item for item in checkpoints if item.run_id == run.run_id)) for run in found.items]
        return JsonResponse({'training_runs': runs, 'cursor': cursor_to_json(part, found)})

    async def _show_run(self, call: HttpCall) -> Response:
        checked_query_of(call)
        run = await self._find(call.path_values['run_id'])
        return JsonResponse(run_to_json(run, await self._browser.checkpoints_of(run.tenant_id, [run.run_id])))

    async def _list_run_checkpoints(self, call: HttpCall) -> Response:
        run_id = call.path_values['run_id']
        found = await self._client.list_of(run_id)
        if not found:
            await self._find(run_id)
        return JsonResponse({'checkpoints': [checkpoint_to_json(item) for item in found]})

    async def _list_checkpoints(self, call: HttpCall) -> Response:
        part = slice_of(checked_query_of(call), limit=100)
        found = await self._browser.checkpoints(current_caller().tenant_id, part)
        checkpoints = [checkpoint_to_json(item) for item in found.items]
        return JsonResponse({'checkpoints': checkpoints, 'cursor': cursor_to_json(part, found)})

    async def _find(self, run_id: str) -> Run:
        """Return a run of the caller, even if it is so new that the catalogue does not list it yet."""
        try:
            return await self._runs.get(current_caller(), run_id)
        except RunNotFound as error:
            try:
                adapter = await self._lookups.adapter(run_id)
            except DomainError:
                raise error from None
            return run_from_proto(adapter, tenant_id=current_caller().tenant_id)


def run_to_json(run: Run, checkpoints: Iterable[Checkpoint]) -> dict[str, Any]:
    """Return the JSON form of a run; `checkpoints` belong to the run, newest first."""
    newest: dict[WeightsKind, Checkpoint] = {}
    for checkpoint in checkpoints:
        newest.setdefault(path_of_native(checkpoint.path).kind, checkpoint)
    last, last_sampler = newest.get(WeightsKind.TRAINING), newest.get(WeightsKind.SAMPLER)
    return {
        'training_run_id': run.run_id,
        'base_model': shown_name(run.base_model),
        'model_owner': run.tenant_id,
        'is_lora': run.lora_rank > 0,
        'corrupted': False,
        'lora_rank': run.lora_rank or None,
        'last_request_time': time_to_json(run.update_time),
        'last_checkpoint': checkpoint_to_json(last) if last else None,
        'last_sampler_checkpoint': checkpoint_to_json(last_sampler) if last_sampler else None,
        'user_metadata': labels_to_json(run.user_metadata),
    }


def checkpoint_to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    path = path_of_native(checkpoint.path)
    return {
        'checkpoint_id': path.checkpoint_id,
        'checkpoint_type': _TYPES[path.kind],
        'time': time_to_json(checkpoint.create_time),
        'tinker_path': str(path),
        'size_bytes': checkpoint.size_bytes,
        'public': checkpoint.is_public,
        'expires_at': time_to_json(checkpoint.expire_time),
        'user_metadata': labels_to_json(checkpoint.user_metadata),
    }


def cursor_to_json(part: Slice, found: Counted[Any]) -> dict[str, int]:
    """Return the position of a page in its list, and the length of the list."""
    return {'offset': part.offset, 'limit': part.limit, 'total_count': found.total_count}


class TtlBody(TinkerModel):
    """Body with a time to live."""

    ttl_seconds: Annotated[int, Field(ge=1, le=10 * 366 * 24 * 3600)] | None = None
    """None stores the weights until they are deleted."""

    @property
    def ttl(self) -> timedelta | None:
        return None if self.ttl_seconds is None else timedelta(seconds=self.ttl_seconds)


class CopyBody(TtlBody):
    """Body of `copy_weights`."""

    weights_access_token: Annotated[None, not_served(_NO_TOKENS)] = None
    destination_project_id: str = ''
    """Ignored, because copies are not assigned to projects."""
    session_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    model_seq_id: Counter | None = Field(default=None, validate_default=True)
    """Number, within the session, of the model that owns the copy."""
    source_path: WeightsPathField

    @field_validator('model_seq_id', mode='before')
    @classmethod
    def _check_model(cls, seq_id: Any, info: ValidationInfo) -> Any:
        if info.data.get('session_id') is None:
            return None
        if seq_id is None:
            raise ValueError('is required with session_id')
        return seq_id


class CheckpointRoutes:
    """Routes that change saved weights."""

    def __init__(self, checkpoints: Checkpoints, sessions: Sessions) -> None:
        self._checkpoints = checkpoints
        self._sessions = sessions

    def routes(self) -> list[Route]:
        publish = partial(self._set_public, is_public=True)
        unpublish = partial(self._set_public, is_public=False)
        return [
            tinker_route(CHECKPOINT_PATH, self._delete, access=CHECKPOINTS, http_method='DELETE'),
            tinker_route(f'{CHECKPOINT_PATH}/publish', publish, access=CHECKPOINTS),
            tinker_route(f'{CHECKPOINT_PATH}/publish', unpublish, access=CHECKPOINTS, http_method='DELETE'),
            tinker_route(f'{CHECKPOINT_PATH}/ttl', self._set_ttl, access=CHECKPOINTS, http_method='PUT'),
            tinker_route('copy_weights', self._copy, access=CHECKPOINTS),
        ]

    async def _delete(self, call: HttpCall) -> Response:
        await self._checkpoints.delete(current_caller(), path_of(call).native)
        return JsonResponse({'type': 'delete_checkpoint'})

    async def _set_public(self, call: HttpCall, *, is_public: bool) -> Response:
        await self._checkpoints.set_public(path_of(call).native, is_public=is_public)
        return JsonResponse({'public': is_public})

    async def _set_ttl(self, call: HttpCall) -> Response:
        path = path_of(call)
        given = await read_body(call, TtlBody)
        await self._checkpoints.set_ttl(path.native, given.ttl)
        return JsonResponse({'type': 'set_checkpoint_ttl'})

    async def _copy(self, call: HttpCall) -> Response:
        given = await read_body(call, CopyBody)
        if _ACCESS_TOKEN in call.headers:
            raise InvalidField(_ACCESS_TOKEN, _NO_TOKENS)
        run_id = ''
        if given.session_id is not None and given.model_seq_id is not None:
            await self._sessions.get(current_caller(), given.session_id)
            run_id = model_id_of(given.session_id, given.model_seq_id)
        # The key identifies repeated requests; it is empty if the client sends none.
        key = text_from_proto(call.headers.get('x-idempotency-key', ''), 'x-idempotency-key', limit=_KEY_LENGTH)
        source = given.source_path
        copy = await self._checkpoints.copy(
            current_caller(), source.native, name=source.native_name, run_id=run_id, key=key, ttl=given.ttl
        )
        return JsonResponse({'tinker_path': str(path_of_native(copy.path))})
