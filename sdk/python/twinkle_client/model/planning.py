"""Cost estimates for planned training runs."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypedDict

from twinkle.api.model.v1 import adapter_service_pb2
from twinkle_client.convert import full_parameter_config, lora_config, optimizer_config
from twinkle_client.model.handle import ModelHandle
from twinkle_client.rpc import remote_method


class EstimateOutput(TypedDict):
    """Estimated cost of a run on the model service."""

    does_fit: bool
    """Whether the run fits into the memory that is available now."""
    parameter_count: int
    """Number of trainable parameters."""
    adapter_bytes: int
    """Memory used between batches."""
    peak_bytes: int
    """Peak memory during a batch."""
    available_bytes: int
    """Memory that is available now."""
    step_time: timedelta
    """Time of one `forward_backward` and one step if no other run is computed."""
    is_measured_under_load: bool
    """Whether the machine was busy while the model was measured, so that `step_time` may be too long. An estimate that
    is requested a minute later or more measures the model again."""


class PlanningVerbs(ModelHandle):
    """Methods that estimate the cost of a run before its adapter is created."""

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
        """Estimate the cost of a run without allocating anything.

        Args:
            config: A `LoraConfig` of peft or of `twinkle`. Unset: default values.
            batch_size: Examples per batch.
            sequence_tokens: Tokens per example.
            label_share: Fraction of the tokens with a label, in (0, 1].
            optimizer: Name or class of the optimizer.
            full_parameters: See `add_adapter_to_model`; cannot be combined with `config`.

        Raises:
            ValueError: `config` is not supported, or `full_parameters` is an empty list.
            NotFoundError: The server has no such model.
            UsageError: A number is out of range, or `config` and `full_parameters` are both given.
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
        response = await self._connection.unary(self._stub.Estimate, request)
        return EstimateOutput(
            does_fit=response.does_fit,
            parameter_count=response.parameter_count,
            adapter_bytes=response.adapter_bytes,
            peak_bytes=response.peak_bytes,
            available_bytes=response.available_bytes,
            step_time=response.step_time.ToTimedelta(),
            is_measured_under_load=response.is_measured_under_load,
        )
