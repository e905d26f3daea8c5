"""Opens the OpenAI API of a gateway."""

from services.gateway.catalogue.runs import Runs
from services.gateway.config import GatewayConfig
from services.gateway.http.call import Route
from services.gateway.openai.models import FleetSamplers, ModelResolver
from services.gateway.openai.routes import OpenAiRoutes
from services.kit.clock import Clock


def open_openai(config: GatewayConfig, samplers: FleetSamplers, runs: Runs, *, clock: Clock) -> list[Route]:
    """Return the routes of the OpenAI API."""
    models = ModelResolver(samplers, runs=runs, started_at=clock.now())
    return OpenAiRoutes(samplers, models, clock=clock, body_bytes=config.http_body_bytes).routes()
