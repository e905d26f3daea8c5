"""Empty the prefix cache."""

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.sampler.ports import SamplerEngine


class ResetPrefixCache:
    """For operators: it slows down every tenant's next requests."""

    def __init__(self, engine: SamplerEngine) -> None:
        """Act on `engine`."""
        self._engine = engine

    async def __call__(self, caller: Caller) -> int:
        """Return how many cached tokens were dropped.

        Raises:
            ScopeMissing: the caller is no operator.
        """
        require_scope(caller, 'operator')
        return await self._engine.reset_prefix_cache()
