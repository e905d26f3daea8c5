"""Puts routers together to one app. A router is a list of `Route`s; what all calls share is in `guard`."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute

from services.gateway.http.call import Route
from services.gateway.http.guard import Guard


def make_app(routers: Iterable[Iterable[Route]], guard: Guard) -> Starlette:
    """Return the app that serves all routers, `/healthz` beside them."""
    routes = [
        StarletteRoute(route.path, guard.around(route), methods=[route.http_method])
        for router in routers
        for route in router
    ]

    async def show_health(request: Request) -> Response:
        del request
        status = HTTPStatus.SERVICE_UNAVAILABLE if guard.is_draining else HTTPStatus.OK
        health: dict[str, Any] = {'status': 'draining' if guard.is_draining else 'serving'}
        # A client of the gRPC API that knows this address alone learns from it where to go.
        if ports := guard.grpc_ports():
            health['grpc_port'] = ports[0]
        return JSONResponse(health, status_code=status)

    app = Starlette(
        routes=[*routes, StarletteRoute('/healthz', show_health, methods=['GET'])],
        exception_handlers={HTTPException: _refuse},
    )
    app.router.redirect_slashes = False
    return app


async def _refuse(request: Request, error: Any) -> Response:
    """Answer for paths and methods that no router has, in the shapes that clients of either API read."""
    # Not `request.url`, which is made with the Host header: that may be anything.
    problem = f'there is no {request.method} {request.scope["path"]} here'[:300]
    body = {'message': problem, 'type': 'invalid_request_error', 'param': None, 'code': 'unknown_url'}
    return JSONResponse({'error': body, 'detail': problem}, status_code=error.status_code, headers=error.headers)
