"""Joins the parts of the Tinker API."""

from collections.abc import Iterable
from typing import Protocol

from services.gateway.http.call import Route


class Part(Protocol):
    """Some of the routes."""

    def routes(self) -> list[Route]:
        """Return them."""
        ...


def tinker_routes(parts: Iterable[Part]) -> list[Route]:
    """Return the routes of all parts, in their order."""
    return [route for part in parts for route in part.routes()]
