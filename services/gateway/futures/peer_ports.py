"""Other gateways on the same database."""

from collections.abc import AsyncGenerator
from typing import Protocol

from services.gateway.futures.news import News


class Peers(Protocol):
    """The places of gateways on one database, and the news between them.

    A gateway that has a place says so again and again; one that falls silent loses it to another, which carries out
    from then on what it was to carry out. Whatever a gateway without its place does to futures has no effect.

    Every verb raises ServiceUnreachable where the database does not answer.
    """

    async def join(self) -> str:
        """Take a place and return its id, which futures have as their owner.

        Raises:
            PayloadsNotShared: a gateway that is there keeps payloads in another folder.
        """
        ...

    async def renew(self, gateway_id: str) -> bool:
        """Say that the gateway is there; False: its place is lost."""
        ...

    async def adopt(self, gateway_id: str) -> int:
        """Make the gateway the owner of all that wait and have no owner who is there; return how many they are."""
        ...

    async def leave(self, gateway_id: str) -> None:
        """Give a place up, and let others know."""
        ...

    async def tell(self, news: News) -> None:
        """Let all gateways know."""
        ...

    def listen(self, gateway_id: str) -> AsyncGenerator[News, None]:
        """Yield what is told from now on, the gateway's own news too; first of all, that some may have been missed."""
        ...
