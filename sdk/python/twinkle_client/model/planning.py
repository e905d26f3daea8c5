"""What a run would cost, before anything is made."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypedDict

from twinkle.api.model.v1 import adapter_service_pb2
from twinkle_client.convert import full_parameter_config, lora_config, optimizer_config
from twinkle_client.model.handle import ModelHandle
from twinkle_client.rpc import remote_method


class EstimateOutput(TypedDict):
    """What a run would cost on the replica."""

    does_fit: bool
    """Whether it fits beside what runs there now."""
    parameter_count: int
    """Trainable parameters."""
    adapter_bytes: int
    """Memory at rest."""
    peak_bytes: int
    """Most memory while a batch runs."""
    available_bytes: int
    """Memory that is free for it now."""
    step_time: timedelta
    """Of one forward_backward and step, alone on the replica."""


class PlanningVerbs(ModelHandle):
    """Verbs that need no adapter."""

    @remote_method
    async def estimate(
        self,
        config: Any = None,
        *,
        batch_size: int,
        sequence_tokens: int,
        label_share: float = 1.0,
        optimizer: Any = 'AdamW',
        full_parameters: bool | Sequence[str] = False,
    ) -> EstimateOutput:
        """Return what a run would cost; nothing is allocated.

        Args:
            config: a `LoraConfig`, peft's or the library's. Unset: one with every default.
            batch_size: examples a batch.
            sequence_tokens: tokens an example.
            label_share: share of the tokens whose label counts, in (0, 1].
            optimizer: name or class.
            full_parameters: as of `add_adapter_to_model`; then `config` is left out.

        Raises:
            UsageError: the server knows no such model, or a number is out of range.
        """
        full = full_parameter_config(names=full_parameters)
        request = adapter_service_pb2.EstimateRequest(
            base_model=self.model_id,
            lora_config=None if full is not None and config is None else lora_config(config or {}),
            optimizer=optimizer_config(optimizer, {}),
            batch_size=batch_size,
            sequence_tokens=sequence_tokens,
            label_share=label_share,
            full_parameters=full,
        )
        answer = await self._connection.unary(self._stub.Estimate, request)
        return EstimateOutput(
            does_fit=answer.does_fit,
            parameter_count=answer.parameter_count,
            adapter_bytes=answer.adapter_bytes,
            peak_bytes=answer.peak_bytes,
            available_bytes=answer.available_bytes,
            step_time=answer.step_time.ToTimedelta(),
        )
