"""Routes for a client's configuration, capabilities, health, telemetry, key and account."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from twinkle_services.gateway.catalogue.sql import SqlBrowser
from twinkle_services.gateway.fleet.model_routes import shown_name
from twinkle_services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.tinker.base_models import BaseModel, BaseModels
from twinkle_services.gateway.tinker.bodies import JSON_LIMIT_BYTES, read_object
from twinkle_services.gateway.tinker.datums import LOSSES
from twinkle_services.gateway.tinker.routes import ANY_KEY, CATALOGUE, query_of, tinker_route
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.server_info import software_version

TELEMETRY_LIMIT_BYTES = 1 << 20
CLIENT_CONFIG: dict[str, Any] = {
    'pjwt_auth_enabled': False,
    'credential_default_source': 'api_key',
    'sample_dispatch_bytes_semaphore_size': 10 << 20,
    'inflight_response_bytes_semaphore_size': 50 << 20,
    'parallel_fwdbwd_chunks': True,
    'proto_compress_fwdbwd': True,
    'fwdbwd_max_chunk_len': 1024,
    'fwdbwd_max_chunk_bytes_count': 5_000_000,
    'fwdbwd_dispatch_bytes_semaphore_size': 50_000_000,
    'billing_exception_max_pause_duration_sec': 3600,
    'sample_no_retries': False,
    'sample_enable_stuck_detection': True,
    'sample_max_concurrent_requests': 256,
    'use_pyqwest_transport': True,
    'sample_use_retrieve_futures': True,
    'custom_loss_server_side': False,
    'sample_join_sampling_session': True,
    # Read only by SDKs 0.22 to 0.36, which otherwise send JSON and calls that no longer exist.
    'proto_write_fwdbwd': True,
    'fwd_via_fwdbwd': True,
    'create_model_via_load_weights': True,
}
"""Configuration of clients. A flag is true only if the server supports the flag's feature."""
DYNAMIC_CONFIG: dict[str, Any] = {
    'refresh_interval_sec': 300,
    'sample_cancel_enabled': True,
    'sample_cancel_max_batch_size': 64,
}
_AUDIT: dict[str, Any] = {'entries': []}
"""Empty, because no audit log is recorded."""
_USAGE: dict[str, Any] = {'data': [], 'sessions': {}}
"""Empty, because nothing is billed."""


class ClientRoutes:
    """Routes of a client's configuration, capabilities, health and telemetry."""

    def __init__(self, base_models: BaseModels) -> None:
        self._base_models = base_models

    def routes(self) -> list[Route]:
        telemetry = partial(_constant, {'status': 'accepted'}, limit_bytes=TELEMETRY_LIMIT_BYTES)
        return [
            tinker_route('client/config', partial(_constant, CLIENT_CONFIG), access=ANY_KEY),
            tinker_route('client/dynamic_config', partial(_constant, DYNAMIC_CONFIG), access=ANY_KEY),
            tinker_route('healthz', partial(_constant, {'status': 'ok'}), access=ANY_KEY, http_method='GET'),
            tinker_route('get_server_capabilities', self._show_capabilities, access=ANY_KEY, http_method='GET'),
            tinker_route('telemetry', telemetry, access=ANY_KEY),
        ]

    async def _show_capabilities(self, call: HttpCall) -> Response:
        call.body_done.set()
        supported = [_supported(model) for model in await self._base_models.list_all()]
        facts = {'loss_fns': sorted(LOSSES), 'optimizers': ['adamw'], 'server_version': software_version()}
        return JsonResponse({'supported_models': supported, **facts})


async def _constant(document: Mapping[str, Any], call: HttpCall, *, limit_bytes: int = JSON_LIMIT_BYTES) -> Response:
    """Return `document` for every call; a posted body is read and discarded."""
    if call.route.http_method == 'POST':
        await read_object(call, limit_bytes=limit_bytes)
    return JsonResponse(document)


def _supported(model: BaseModel) -> dict[str, Any]:
    return {
        'model_name': shown_name(model.name),
        'max_context_length': model.context_tokens or None,
        'max_lora_rank': model.max_lora_rank or None,
        'max_batch_tokens': model.max_batch_tokens or None,
        'trainable': model.is_trainable,
        'sampleable': model.is_sampleable,
    }


class AccountRoutes:
    """Routes of the caller's key and account."""

    def __init__(self, browser: SqlBrowser, *, revoke: Callable[[str], Awaitable[object]]) -> None:
        self._browser = browser
        self._revoke = revoke

    def routes(self) -> list[Route]:
        return [
            tinker_route('auth/apikey/me', self._show_key, access=ANY_KEY, http_method='GET'),
            tinker_route('auth/apikey/me', self._revoke_key, access=ANY_KEY, http_method='DELETE'),
            tinker_route('audit', partial(_constant, _AUDIT), access=CATALOGUE, http_method='GET'),
            tinker_route('billing/usage/events', partial(_constant, _USAGE), access=CATALOGUE, http_method='GET'),
            tinker_route('billing/usage/checkpoints/current', self._show_storage, access=CATALOGUE, http_method='GET'),
        ]

    async def _show_key(self, call: HttpCall) -> Response:
        del call
        caller = current_caller()
        # Clients expect a number, but key ids are strings.
        number = int.from_bytes(hashlib.sha256(caller.key_id.encode()).digest()[:6], 'big')
        details = {'org_details': {'name': caller.tenant_id}, 'user_details': {'email': ''}}
        return JsonResponse({'key_id': number, 'name': caller.key_id, 'note': '', 'details': details})

    async def _revoke_key(self, call: HttpCall) -> Response:
        del call
        caller = current_caller()
        if 'admin' in caller.scopes:
            raise InvalidField('key', 'an administration key cannot be revoked by logging out; use the key service')
        await self._revoke(caller.key_id)
        return JsonResponse({'type': 'delete_api_key'})

    async def _show_storage(self, call: HttpCall) -> Response:
        project_id = query_of(call).get('project_id', '')
        count, size_bytes = await self._browser.stored(current_caller().tenant_id, project_id=project_id)
        stored = {'checkpoint_count': count, 'size_bytes': size_bytes, 'size_gigabytes': size_bytes / 10**9}
        return JsonResponse({'data': [stored]})
