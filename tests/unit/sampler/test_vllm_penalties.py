"""Unit tests of the penalties of continued sequences, with the loaders of both of vLLM's model runners."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessors,
    build_logitsprocs,
    validate_logits_processors_parameters,
)
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    build_custom_logits_processors,
    build_custom_logits_processors_params_validator,
)

from twinkle.data_format import SamplingParams as OurParams
from twinkle.sampler.vllm.options import add_penalties, engine_args
from twinkle.sampler.vllm.penalties import penalty_arguments

BEGUN = [3, 5]
"""Tokens that another engine sampled. vLLM receives them as the end of the prompt."""
PROMPT = [1, 2, *BEGUN]
SAMPLED = [3, 7]
VOCABULARY = 16
OURS = OurParams(max_tokens=8, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
CONTINUED = SamplingParams(**penalty_arguments(OURS, BEGUN))
PLAIN = SamplingParams()


@pytest.fixture
def configs(tiny_qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bool, VllmConfig]:
    """Configurations of an engine, by whether the engine uses the V2 model runner."""
    found: dict[bool, VllmConfig] = {}
    for is_v2 in (False, True):
        # vLLM creates a configuration of the V2 runner only if Triton is installed, so the runner is selected later.
        monkeypatch.setenv('VLLM_USE_V2_MODEL_RUNNER', '0')
        arguments = engine_args(str(tiny_qwen3_dir), {'max_model_len': 64, 'dtype': 'float32'})
        found[is_v2] = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        monkeypatch.setenv('VLLM_USE_V2_MODEL_RUNNER', str(int(is_v2)))
        add_penalties(found[is_v2])
    return found


def expected_logits() -> torch.Tensor:
    """Return the logits of one sequence after the penalties; before the penalties, all logits are 4."""
    logits = torch.full((VOCABULARY,), 4.0)
    logits[torch.tensor([1, 2, 3, 5, 7])] = 2.0
    for token in (*BEGUN, *SAMPLED):
        logits[token] -= 0.25
    logits[torch.tensor([3, 5, 7])] -= 0.5
    return logits


class Buffer:
    """A buffer of the V2 runner, as an array on the host and on the device; the real buffer needs an accelerator."""

    def __init__(self, *shape: int) -> None:
        self.gpu = torch.zeros(shape, dtype=torch.int32)
        self.np = self.gpu.numpy()


class States:
    """The part of the V2 runner's states of four requests that logits processors can read."""

    def __init__(self) -> None:
        self.device = torch.device('cpu')
        self.max_num_reqs, self.vocab_size = 4, VOCABULARY
        self.all_token_ids = Buffer(4, 64)
        self.prompt_len, self.prefill_len, self.total_len = Buffer(4), Buffer(4), Buffer(4)


def v2_processors(config: VllmConfig, states: Any) -> list[LogitsProcessor]:
    """Load the processors as the V2 runner and its frontend do."""
    names = config.model_config.logits_processors
    assert names is not None
    build_custom_logits_processors_params_validator(names)(CONTINUED)
    return build_custom_logits_processors(config, states, is_pooling_model=False, custom_logitsprocs=names)


def v1_processors(config: VllmConfig) -> LogitsProcessors:
    """Load the processors as the V1 runner and its frontend do."""
    names = config.model_config.logits_processors
    assert names is not None
    validate_logits_processors_parameters(names, CONTINUED)
    device = torch.device('cpu')
    return build_logitsprocs(config, device, is_pin_memory=False, is_pooling_model=False, custom_logitsprocs=names)


def test_v1_runner_loads_and_applies_the_penalties(configs: dict[bool, VllmConfig]):
    """The V1 runner loads the class, which penalizes a continued sequence and leaves another sequence unchanged."""
    (processor,) = v1_processors(configs[False]).non_argmax_invariant[-1:]
    added = [(0, PLAIN, PROMPT, SAMPLED), (1, CONTINUED, PROMPT, SAMPLED)]
    processor.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
    logits = processor.apply(torch.full((2, VOCABULARY), 4.0))
    assert torch.equal(logits[0], torch.full((VOCABULARY,), 4.0))
    assert torch.equal(logits[1], expected_logits())


@pytest.mark.parametrize('draft_count', [0, 1, 2])
def test_v2_runner_loads_and_applies_the_penalties(configs: dict[bool, VllmConfig], draft_count: int):
    """The V2 runner loads its class, which counts committed tokens and a draft model's tokens in the same way."""
    states = States()
    (processor,) = v2_processors(configs[True], states)
    tokens = [*PROMPT, *SAMPLED]
    committed = len(tokens) - draft_count
    states.all_token_ids.gpu[2, :committed] = torch.tensor(tokens[:committed], dtype=torch.int32)
    states.prompt_len.np[2] = len(PROMPT)
    assert not processor.add_request(0, PLAIN)
    assert processor.add_request(2, CONTINUED)
    processor.apply_staged_writes()
    # The first row belongs to slot 0. Slot 2 has one row for the committed tokens and one for each draft token.
    rows = draft_count + 1
    context = LogitsContext(
        expanded_idx_mapping=torch.tensor([0, *[2] * rows]),
        idx_mapping=torch.tensor([0, 2]),
        idx_mapping_np=np.array([0, 2]),
        expanded_local_pos=torch.tensor([0, *range(rows)]),
        input_ids=torch.tensor([9, *tokens[committed - 1 :]]),
        pos=torch.tensor([3, *range(committed - 1, len(tokens))]),
        seq_lens_upper_bound_np=np.array([4, len(tokens)]),
    )
    logits = processor.apply(torch.full((1 + rows, VOCABULARY), 4.0), context)
    assert torch.equal(logits[0], torch.full((VOCABULARY,), 4.0))
    assert torch.equal(logits[-1], expected_logits())


def test_slot_of_a_finished_request_has_no_penalties(configs: dict[bool, VllmConfig]):
    """A request that gets a penalized request's slot is not penalized."""
    (processor,) = v2_processors(configs[True], States())
    assert processor.add_request(0, CONTINUED)
    assert not processor.add_request(0, PLAIN)
