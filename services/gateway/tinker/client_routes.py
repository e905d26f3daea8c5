"""What a client asks before and beside its work: how to behave, what is served, whether all is well; its telemetry."""

from typing import Any

from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.tinker.base_models import BaseModel, BaseModels
from services.gateway.tinker.bodies import read_body
from services.gateway.tinker.losses import LOSSES
from services.gateway.tinker.routes import ANY_KEY, tinker_route
from services.kit.rpc.server_info import software_version

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
    # Read by SDKs 0.22 to 0.36 alone, which would otherwise send JSON and calls that are long gone.
    'proto_write_fwdbwd': True,
    'fwd_via_fwdbwd': True,
    'create_model_via_load_weights': True,
}
"""How clients are to behave. A flag is true only where what it asks for is served."""
DYNAMIC_CONFIG: dict[str, Any] = {
    'refresh_interval_sec': 300,
    'sample_cancel_enabled': True,
    'sample_cancel_max_batch_size': 64,
}


class ClientRoutes:
    """Serves them."""

    def __init__(self, base_models: BaseModels) -> None:
        self._base_models = base_models

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route('client/config', self._show_config, access=ANY_KEY),
            tinker_route('client/dynamic_config', self._show_dynamic_config, access=ANY_KEY),
            tinker_route('healthz', self._show_health, access=ANY_KEY, http_method='GET'),
            tinker_route('get_server_capabilities', self._show_capabilities, access=ANY_KEY, http_method='GET'),
            tinker_route('telemetry', self._take_telemetry, access=ANY_KEY),
        ]

    async def _show_config(self, call: HttpCall) -> Response:
        await read_body(call, dict)
        return JsonResponse(CLIENT_CONFIG)

    async def _show_dynamic_config(self, call: HttpCall) -> Response:
        await read_body(call, dict)
        return JsonResponse(DYNAMIC_CONFIG)

    async def _show_health(self, call: HttpCall) -> Response:
        call.body_done.set()
        return JsonResponse({'status': 'ok'})

    async def _show_capabilities(self, call: HttpCall) -> Response:
        call.body_done.set()
        supported = [_supported(model) for model in await self._base_models.list_all()]
        facts = {'loss_fns': sorted(LOSSES), 'optimizers': ['adamw'], 'server_version': software_version()}
        return JsonResponse({'supported_models': supported, **facts})

    async def _take_telemetry(self, call: HttpCall) -> Response:
        """Read and drop it: what clients tell of themselves is not kept here."""
        await read_body(call, dict, limit_bytes=TELEMETRY_LIMIT_BYTES)
        return JsonResponse({'status': 'accepted'})


def _supported(model: BaseModel) -> dict[str, Any]:
    return {
        'model_name': model.name,
        'max_context_length': model.context_tokens or None,
        'max_lora_rank': model.max_lora_rank or None,
        'max_batch_tokens': model.max_batch_tokens or None,
        'trainable': model.is_trainable,
        'sampleable': model.is_sampleable,
    }
