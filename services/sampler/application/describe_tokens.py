"""Say what tokens stand for."""

from services.kit.errors import BaseModelNotFound
from services.sampler.domain.generation import TokenForm
from services.sampler.ports import SamplerEngine


class DescribeTokens:
    """Looks tokens up in the engine's vocabulary, which never changes."""

    def __init__(self, engine: SamplerEngine) -> None:
        """Ask `engine`."""
        self._engine = engine

    async def __call__(self, base_model: str, token_ids: tuple[int, ...]) -> tuple[TokenForm, ...]:
        """Return what each token stands for.

        Raises:
            BaseModelNotFound: another model is served here.
            InvalidField: a token is outside the vocabulary.
        """
        served = self._engine.facts.base_model
        if base_model != served:
            raise BaseModelNotFound(base_model, (served,))
        return await self._engine.describe_tokens(token_ids)
