"""The executor of requests that were refused at the door, and yet have a place in their lane."""

import json

from services.gateway.futures.rules import Future
from services.kit.errors import InvalidField

REFUSED = 'refused'
"""Their kind."""


class Refuse:
    """Implements `ports.Executor`: fails at once, so that what stands behind it in its lane can run.

    Clients count a request although it was refused; without it, those after it would wait for its number.
    """

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Raise what the client was told.

        Raises:
            InvalidField: always.
        """
        del future
        raise InvalidField(**json.loads(payload))

    async def stop(self, future: Future) -> bool:
        """Say that it may be cut off."""
        del future
        return True


def refusal_payload(field: str, problem: str) -> bytes:
    """Return the payload of a refused request: what was wrong with it."""
    return json.dumps({'field': field, 'problem': problem}).encode()
