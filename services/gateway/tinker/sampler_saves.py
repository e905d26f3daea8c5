"""Sampling sessions of weights that a model publishes without a name."""

from services.gateway.sampling.handles import SamplingHandles
from services.gateway.sampling.rules import HandleRequest
from services.gateway.tinker.runs import KnownModels


class HandleSaves:
    """Implements `ports.SamplerSaves` with sampling handles."""

    def __init__(self, handles: SamplingHandles, runs: KnownModels) -> None:
        """Make `handles`; `runs` know the base models."""
        self._handles = handles
        self._runs = runs

    async def attach(
        self, *, handle_id: str, session_id: str, model_id: str, future_id: str, is_inflight: bool
    ) -> None:
        """Make the sampling session whose weights a future publishes; the same again is no error.

        Raises:
            RequestIdReused: the id is taken by another one.
        """
        await self._handles.open(
            HandleRequest(
                handle_id=handle_id,
                session_id=session_id,
                base_model=await self._runs.base_model_of(model_id),
                adapter_id=model_id,
                future_id=future_id,
                is_inflight=is_inflight,
            )
        )
