"""What a client asks about its key and its account."""

import hashlib
from collections.abc import Awaitable, Callable

from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.tinker.catalogue_ports import Browser
from services.gateway.tinker.queries import query_of
from services.gateway.tinker.routes import ANY_KEY, CATALOGUE, tinker_route
from services.kit.errors import InvalidField
from services.kit.rpc.context import current_caller

_GIGABYTE = 10**9


class AccountRoutes:
    """Serves them."""

    def __init__(self, browser: Browser, *, revoke: Callable[[str], Awaitable[object]]) -> None:
        """Count what `browser` finds; `revoke` makes a key worthless."""
        self._browser = browser
        self._revoke = revoke

    def routes(self) -> list[Route]:
        """Return the routes."""
        shown = {
            'auth/apikey/me': (self._show_key, ANY_KEY),
            'audit': (self._show_audit, CATALOGUE),
            'billing/usage/events': (self._show_usage, CATALOGUE),
            'billing/usage/checkpoints/current': (self._show_storage, CATALOGUE),
        }
        return [
            *(tinker_route(path, serve, access=access, http_method='GET') for path, (serve, access) in shown.items()),
            tinker_route('auth/apikey/me', self._revoke_key, access=ANY_KEY, http_method='DELETE'),
        ]

    async def _show_key(self, call: HttpCall) -> Response:
        del call
        caller = current_caller()
        # Clients want a number; ours are names.
        number = int.from_bytes(hashlib.sha256(caller.key_id.encode()).digest()[:6], 'big')
        details = {'org_details': {'name': caller.tenant_id}, 'user_details': {'email': ''}}
        return JsonResponse({'key_id': number, 'name': caller.key_id, 'note': '', 'details': details})

    async def _revoke_key(self, call: HttpCall) -> Response:
        del call
        caller = current_caller()
        if 'admin' in caller.scopes:
            problem = 'a key that administers this server is not revoked by logging out; use the key service'
            raise InvalidField('key', problem)
        await self._revoke(caller.key_id)
        return JsonResponse({'type': 'delete_api_key'})

    async def _show_audit(self, call: HttpCall) -> Response:
        """Response that there is nothing: no such record is kept here."""
        del call
        return JsonResponse({'entries': []})

    async def _show_usage(self, call: HttpCall) -> Response:
        """Response that nothing was billed: nothing is here."""
        del call
        return JsonResponse({'data': [], 'sessions': {}})

    async def _show_storage(self, call: HttpCall) -> Response:
        project_id = query_of(call).get('project_id', '')
        count, size_bytes = await self._browser.stored(current_caller().tenant_id, project_id=project_id)
        gigabytes = size_bytes / _GIGABYTE
        return JsonResponse(
            {'data': [{'checkpoint_count': count, 'size_bytes': size_bytes, 'size_gigabytes': gigabytes}]}
        )
