"""Compare one shared training pass of several adapters with sequential passes and with transformers + peft.

Everything runs on one thread and is measured in CPU time. The variants alternate within one run, so that other work on
the machine affects all of them equally. A pass consists of the forward pass, the head, and the backward pass. Twinkle
computes the head only at the labels, and transformers computes the head at all tokens.

Shape letters: N sequences of L tokens each, T = N * L tokens of the flattened batch, D the hidden size, and R tokens
with labels.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from twinkle.data_format import LoraConfig
from twinkle.hub import resolve_model
from twinkle.nn import AdapterSpan, LoraWeights, PackedCausalLM, SequenceSpan

MODEL = 'smollm2-135m-instruct'
ADAPTERS = 8
TOKENS = (16, 32, 64, 128, 256)
"""Numbers of tokens per adapter in a pass."""
SOLO_LENGTH = 64
"""Number of tokens per sequence in the comparison with transformers + peft."""
ROUNDS = 2


def main() -> dict[str, Any]:
    """Run the comparisons and return their figures."""
    torch.set_num_threads(1)
    model = PackedCausalLM.load(resolve_model(MODEL))
    config = LoraConfig(r=8, lora_alpha=16)
    adapters = [LoraWeights.create(model.layers, config, seed=seed, is_trainable=True) for seed in range(ADAPTERS)]
    together = {str(length): _together_over_alone(model, adapters, length) for length in TOKENS}
    return {
        'model': MODEL,
        'adapters': ADAPTERS,
        'together_over_one_after_the_other': together,
        'goal_at_64_tokens': '>= 2.5',
        'one_adapter': _one_adapter(model, adapters[0]),
        'goal_over_peft': '>= 1.5',
        'rounds': ROUNDS,
    }


def _together_over_alone(model: PackedCausalLM, adapters: Sequence[LoraWeights], length: int) -> dict[str, float]:
    durations = _time_alternately(
        {
            'together': lambda: _packed_pass(model, adapters, length=length, label_share=1.0),
            'alone': lambda: [_packed_pass(model, [adapter], length=length, label_share=1.0) for adapter in adapters],
        }
    )
    return {
        'tokens_per_second': round(len(adapters) * length / durations['together'], 1),
        'ratio': round(durations['alone'] / durations['together'], 3),
    }


def _one_adapter(model: PackedCausalLM, adapter: LoraWeights) -> dict[str, Any]:
    """Compare the methods on batches of eight sequences of equal length, which need no padding."""
    bare = _bare_model()
    checkpointed = PackedCausalLM.load(resolve_model(MODEL), is_checkpointed=True)
    adapters = [adapter] * ADAPTERS
    figures: dict[str, Any] = {}
    for share in (1.0, 0.5):
        durations = _time_alternately(
            {
                'packed': lambda share=share: _packed_pass(model, adapters, length=SOLO_LENGTH, label_share=share),
                'packed_checkpointed': lambda share=share: _packed_pass(
                    checkpointed, adapters, length=SOLO_LENGTH, label_share=share
                ),
                'transformers_and_peft': lambda share=share: _bare_pass(bare, label_share=share),
            }
        )
        tokens = ADAPTERS * SOLO_LENGTH
        figures[f'label_share_{share}'] = {
            'tokens_per_second': {name: round(tokens / seconds, 1) for name, seconds in durations.items()},
            'over_peft': round(durations['transformers_and_peft'] / durations['packed'], 3),
            'time_of_checkpointing': round(durations['packed_checkpointed'] / durations['packed'], 3),
        }
    return figures


def _time_alternately(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            if number:
                seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _packed_pass(
    model: PackedCausalLM, adapters: Sequence[LoraWeights], *, length: int, label_share: float
) -> Sequence[Tensor]:
    ids_NL, rows = _batch(len(adapters), length, label_share)
    ends = [(index + 1) * length for index in range(len(adapters))]
    spans = [
        AdapterSpan(end - length, end, adapter, adapter.sample_dropout())
        for end, adapter in zip(ends, adapters, strict=True)
    ]
    unique = {id(adapter): adapter for adapter in adapters}.values()
    if len(unique) == 1:
        spans = [AdapterSpan(0, ends[-1], adapters[0], adapters[0].sample_dropout())]
    hidden_TD = model.hidden(
        ids_NL.flatten(),
        torch.arange(length).repeat(len(adapters)),
        sequences=[SequenceSpan(end - length, end) for end in ends],
        adapters=spans,
    )
    logps_R = model.head_outputs(hidden_TD[rows], ids_NL.flatten()[rows]).logps_R
    return torch.autograd.grad(-logps_R.sum(), [tensor for adapter in unique for tensor in adapter.parameters()])


def _bare_model() -> torch.nn.Module:
    base = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32)
    config = PeftLoraConfig(r=8, lora_alpha=16, target_modules='all-linear', task_type='CAUSAL_LM')
    return get_peft_model(base, config).train()


def _bare_pass(model: torch.nn.Module, *, label_share: float) -> Sequence[Tensor]:
    ids_NL, rows = _batch(ADAPTERS, SOLO_LENGTH, label_share)
    labels = torch.full_like(ids_NL.flatten(), -100)
    labels[rows] = ids_NL.flatten()[rows]
    logits = model(input_ids=ids_NL).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction='sum')
    return torch.autograd.grad(loss, [tensor for tensor in model.parameters() if tensor.requires_grad])


def _batch(count: int, length: int, label_share: float) -> tuple[Tensor, Tensor]:
    """Return random token ids, int64 [N, L], and the indices of the tokens with labels, int64 [R].

    N is `count` and L is `length`. The indices refer to the flattened batch. They select the last
    `round(label_share * length)` tokens of each sequence.
    """
    ids_NL = torch.randint(40_000, (count, length), generator=torch.Generator().manual_seed(0))
    first = length - round(label_share * length)
    return ids_NL, (torch.arange(first, length) + length * torch.arange(count)[:, None]).flatten()
