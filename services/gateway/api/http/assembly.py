"""Puts the HTTP side together: the app, its routers, and the server they run in."""

from collections.abc import Iterable, Sequence

from services.gateway.api.http.app import make_app
from services.gateway.api.http.call import Route
from services.gateway.api.http.guard import Guard
from services.gateway.api.http.openai.model_names import ModelNames
from services.gateway.api.http.openai.router import OpenAiRouter
from services.gateway.api.http.openai.samplers import Samplers
from services.gateway.api.http.server import HttpOptions, HttpServer
from services.gateway.application.get_run import GetRun
from services.gateway.application.list_runs import ListRuns
from services.gateway.ports import RunStore
from services.kit.clock import Clock
from services.kit.rpc.auth import Authenticator


def make_http_server(
    options: HttpOptions,
    *,
    authenticator: Authenticator,
    samplers: Samplers,
    runs: RunStore,
    clock: Clock,
    routers: Sequence[Iterable[Route]] = (),
) -> HttpServer:
    """Return the server of OpenAI's API and of `routers`, not started."""
    guard = Guard(authenticator, memory=options.memory)
    models = ModelNames(samplers, get_run=GetRun(runs), list_runs=ListRuns(runs), started_at=clock.now())
    openai = OpenAiRouter(samplers, models, clock=clock, body_bytes=options.body_bytes)
    return HttpServer(make_app([openai.routes(), *routers], guard), guard, options)
