"""Opens the OpenAI API of a gateway."""

from services.gateway.catalogue.get_run import GetRun
from services.gateway.catalogue.list_runs import ListRuns
from services.gateway.catalogue.ports import RunStore
from services.gateway.config import GatewayConfig
from services.gateway.http.call import Route
from services.gateway.openai.names import ModelResolver
from services.gateway.openai.routes import OpenAiRoutes
from services.gateway.openai.samplers import FleetSamplers
from services.kit.clock import Clock


def open_openai(config: GatewayConfig, samplers: FleetSamplers, runs: RunStore, *, clock: Clock) -> list[Route]:
    """Return the routes of the OpenAI API."""
    models = ModelResolver(samplers, get_run=GetRun(runs), list_runs=ListRuns(runs), started_at=clock.now())
    return OpenAiRoutes(samplers, models, clock=clock, body_bytes=config.http_body_bytes).routes()
