"""Unit tests of the code in vLLM's workers: slots, penalties and the watchdog."""

import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import twinkle.sampler
from twinkle.data_format import LoraConfig, PromptProbe, SamplingParams
from twinkle.sampler.engine.stopping import StopRules
from twinkle.sampler.vllm.adapter_slots import MappedAdapter, Slots
from twinkle.sampler.vllm.embeddings import EMBEDDING_KEY
from twinkle.sampler.vllm.handover import layout_of
from twinkle.sampler.vllm.penalties import _Row
from twinkle.sampler.vllm.plans import LayerPlan, Misfit, Plan, TensorLocation, make_plan
from twinkle.sampler.vllm.sampling import sequence_seed, vllm_params

WATCHDOG = Path(twinkle.sampler.__file__).parent / 'vllm' / 'watchdog.py'
CHILD = f"""
import runpy, sys, time
runpy.run_path({str(WATCHDOG)!r})['exit_with_owner']()
print('ready', flush=True)
time.sleep(600)
"""
"""Program of a process with the watchdog."""
OWNER = f"""
import runpy, subprocess, sys
runpy.run_path({str(WATCHDOG)!r})['record_owner']()
child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
"""Program of the owner. It starts the child and prints the child's process id."""


def test_adapter_without_matrices_is_refused():
    """Weights without any LoRA matrix raise `Misfit`, an error that does not stop the engine."""
    model = SimpleNamespace(modules={'q': None}, packed_modules={}, model=None)
    with pytest.raises(Misfit, match='no LoRA matrices'):
        make_plan(model, layout_of({}, LoraConfig(r=4)))


class Layer:
    """The part of vLLM's LoRA layer that `Slots` uses."""

    def __init__(self) -> None:
        self.lora_a_stacked = (torch.zeros(2, 1, 4, 6),)
        self.lora_b_stacked = (torch.zeros(2, 1, 5, 4),)

    def reset_lora(self, slot: int) -> None:
        """Clear a slot."""
        self.lora_a_stacked[0][slot] = 0
        self.lora_b_stacked[0][slot] = 0


class Manager:
    """The part of vLLM's adapter manager that `Slots` uses."""

    def __init__(self) -> None:
        self.modules = {'q': Layer(), 'k': Layer()}


def test_slot_contains_exactly_one_adapter():
    """A slot that is reused for other layouts contains only the factors of the last adapter."""
    a = TensorLocation(torch.float32, (3, 6), 0)
    b = TensorLocation(torch.float32, (5, 3), 72)
    values = torch.arange(1, 34, dtype=torch.float32)
    buffer = values.view(torch.uint8)
    manager = Manager()
    slots = Slots(manager)
    for number in range(200):
        name, other = ('q', 'k') if number % 2 else ('k', 'q')
        layer = LayerPlan(a, b, scaling=2.0)
        slots.fill(1, MappedAdapter(number + 1, Plan(132, 3, {name: (layer,)}), buffer))
        filled, empty = manager.modules[name], manager.modules[other]
        assert torch.equal(filled.lora_a_stacked[0][1, 0, :3], values[:18].view(3, 6))
        assert torch.equal(filled.lora_b_stacked[0][1, 0, :, :3], 2 * values[18:].view(5, 3))
        assert not empty.lora_a_stacked[0].any()
        assert not empty.lora_b_stacked[0].any()


def test_unaligned_tensors_are_copied():
    """A tensor whose bytes are unaligned, because a smaller dtype precedes it, is read like an aligned tensor."""
    values = torch.arange(6, dtype=torch.float32).view(2, 3)
    for offset in range(8):
        buffer = torch.cat([torch.zeros(offset, dtype=torch.uint8), values.flatten().view(torch.uint8)])
        assert torch.equal(TensorLocation(torch.float32, (2, 3), offset).view(buffer), values)


def test_penalties_count_tokens_of_another_engine():
    """Tokens that another engine generated for a continued sequence count for the frequency penalty.

    They count like this engine's tokens. Prompt tokens count only for the repetition penalty.
    """
    row = _Row(prompt=[1, 2, 3], begun=[3], sampled_ids=[3, 4, -1], repetition=2.0, presence=0.5, frequency=0.25)
    logits = torch.full((6,), 4.0)
    row.apply(logits)
    assert logits.tolist() == [4.0, 2.0, 2.0, 2.0 - 0.5 - 2 * 0.25, 2.0 - 0.5 - 0.25, 4.0]


def test_continued_sequence_requests_the_remaining_tokens():
    """The token limits are reduced by the number of already delivered tokens.

    This library's penalties replace those of vLLM.
    """
    params = SamplingParams(max_tokens=8, min_tokens=4, frequency_penalty=0.5, seed=3)
    rules = StopRules.of(params, eos_token_ids=frozenset({2}), max_new_tokens=8)
    continued_params = vllm_params(params, rules, sequence_index=1, sampled_ids=(5, 6, 7))
    assert (continued_params.max_tokens, continued_params.min_tokens, continued_params.stop_token_ids) == (5, 1, [2])
    assert continued_params.frequency_penalty == 0.0
    assert continued_params.extra_args
    whole = vllm_params(params, rules, sequence_index=1, sampled_ids=())
    assert whole.frequency_penalty == 0.5
    assert not whole.extra_args


def test_only_one_sequence_computes_the_results_of_the_prompt():
    """Log-probabilities and the embedding of the prompt are computed only for a sequence with a key."""
    params = SamplingParams(max_tokens=8, prompt_logprobs=2, prompt_probe=PromptProbe(is_embedding_returned=True))
    rules = StopRules.of(params, eos_token_ids=frozenset({2}), max_new_tokens=8)
    first, other = (
        vllm_params(params, rules, sequence_index=0, sampled_ids=(), prompt_key=key) for key in ('it/0', '')
    )
    assert (first.prompt_logprobs, first.extra_args) == (2, {EMBEDDING_KEY: 'it/0'})
    assert other.prompt_logprobs is None
    assert not other.extra_args


def test_neighbouring_seeds_share_no_sequence():
    """Every pair of a seed and a sequence index gives a different sequence seed below 2**63."""
    seeds = {sequence_seed(seed, index) for seed in range(32) for index in range(32)}
    assert len(seeds) == 1024
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_process_exits_with_its_owner():
    """A process with the watchdog exits when its owner is killed by SIGKILL."""
    owner = subprocess.Popen([sys.executable, '-c', OWNER, CHILD], stdout=subprocess.PIPE, text=True)
    try:
        child = os.pidfd_open(int(owner.stdout.readline()))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    # A pidfd becomes readable when the process has exited.
    assert select.select([child], [], [], 30)[0]
    os.close(child)
