"""An untrained adapter in the model service gives the results of the base model."""

import asyncio
from pathlib import Path

import pytest

from fixtures.model_service import RunningModel, batch_of, draw_example, serving_model
from twinkle.api.model.v1 import operation_pb2, training_config_pb2

EXAMPLES = [draw_example(length, seed=length) for length in (30, 7, 12)]
LORA = training_config_pb2.LoraConfig(lora_rank=4, seed=3)


async def _logprobs(model: RunningModel, adapter_id: str, number: int, *, is_base: bool) -> tuple[list[bytes], int]:
    """Return the log-probabilities of the examples, and the number of adapters in their pass."""
    options = operation_pb2.ForwardOptions(is_adapter_disabled=is_base)
    only = operation_pb2.ForwardOnly(batch=batch_of(EXAMPLES), options=options)
    result = await model.result(adapter_id, number, forward_only=only)
    return [tensor.data for tensor in result.forward.logprobs], result.receipt.pass_adapter_count


@pytest.mark.timeout(180)
async def test_untrained_adapter_equals_the_base_model(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """An untrained adapter has bitwise the same log-probabilities as the base model, alone and in shared passes."""
    async with serving_model(tiny_llama_dir, tmp_path) as model:
        ids = [(await model.create(request_id=f'r{index}', lora_config=LORA)).adapter_id for index in range(3)]
        base, _ = await _logprobs(model, ids[0], 1, is_base=True)
        alone, _ = await _logprobs(model, ids[0], 2, is_base=False)
        assert alone == base
        shared = 1
        # Requests that arrive at different times run in different passes.
        for number in range(3, 60):
            numbers = [number, number - 2, number - 2]
            found = await asyncio.gather(
                *(_logprobs(model, name, at, is_base=False) for name, at in zip(ids, numbers, strict=True))
            )
            assert [values for values, _ in found] == [base] * 3
            shared = max(shared, *(count for _, count in found))
            if shared > 1:
                break
        assert shared > 1
