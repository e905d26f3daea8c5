"""Puts the HTTP side together: the app, its routers, and the server they run in."""

from collections.abc import Iterable, Sequence

from services.gateway.catalogue.get_run import GetRun
from services.gateway.catalogue.list_runs import ListRuns
from services.gateway.catalogue.ports import RunStore
from services.gateway.http.app import make_app
from services.gateway.http.call import Route
from services.gateway.http.guard import Guard
from services.gateway.http.server import HttpOptions, HttpServer
from services.gateway.openai.model_names import ModelNames
from services.gateway.openai.router import OpenAiRouter
from services.gateway.openai.samplers import Samplers
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
