"""Trained tokens per second through gateway and model service, against a loop with transformers + peft.

Both programs train a LoRA adapter of rank 8 on the same batches with one torch thread. Their steps alternate within one
run, so that other work on the machine affects both equally. Padding is not counted.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.local_stack import THREADS, connected, running_stack
from benchmarks.timing import ratio_by_round, time_alternately
from twinkle.data_format import IGNORE_INDEX, LoraConfig
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.hub import resolve_model
from twinkle_client.model import MultiLoraTransformersModel

MODEL = 'smollm2-135m-instruct'
BATCH_SIZE = 8
ROUNDS = 9
CASES = (('all_labels', 0.0, '>= 1.0'), ('prompts_half', 0.5, '>= 1.5'))
"""Name, fraction of each example that is the prompt, and the goal for the ratio."""
DATA = Path(__file__).parents[1] / 'examples' / 'data' / 'self_cognition.jsonl'


def main() -> dict[str, Any]:
    """Run the comparison and return its figures."""
    batches = _batches()
    bare = _BareLoop()
    with running_stack() as state, connected(state) as client:
        model = MultiLoraTransformersModel(MODEL, client=client)
        model.add_adapter_to_model('bench', LoraConfig(r=8, lora_alpha=16, seed=0))
        model.set_optimizer('AdamW', lr=1e-4)
        figures = {
            name: _compare(model, bare, [_labelled(batch, prompt_share=share) for batch in batches], goal=goal)
            for name, share, goal in CASES
        }
    tokens = [sum(len(feature['input_ids']) for feature in batch) for batch in batches]
    padded = [len(batch) * max(len(feature['input_ids']) for feature in batch) for batch in batches]
    return {
        **figures,
        'batch_size': BATCH_SIZE,
        'real_tokens_per_batch': tokens,
        'padded_tokens_per_batch_of_bare_loop': padded,
        'threads': THREADS,
        'rounds': ROUNDS,
    }


def _compare(
    model: MultiLoraTransformersModel, bare: '_BareLoop', batches: list[list[dict[str, Any]]], *, goal: str
) -> dict[str, Any]:
    """Train on the batches with each method alternately, and compare the times."""
    batch_counts = {'bare': 0, 'service': 0, 'service_pipelined': 0}

    def next_batch(name: str) -> list[dict[str, Any]]:
        batch_counts[name] += 1
        return batches[batch_counts[name] % len(batches)]

    durations = time_alternately(
        {
            'bare': lambda: bare.step(next_batch('bare')),
            'service': lambda: _service_step(model, next_batch('service')),
            'service_pipelined': lambda: _pipelined_step(model, next_batch('service_pipelined')),
        },
        rounds=ROUNDS,
        warmups=len(batches),
    )
    tokens = sum(len(feature['input_ids']) for batch in batches for feature in batch) / len(batches)
    return {
        'service_over_bare': ratio_by_round(durations['bare'], durations['service']),
        'pipelined_over_bare': ratio_by_round(durations['bare'], durations['service_pipelined']),
        'goal': goal,
        'tokens_per_second_of_the_median': {
            name: round(tokens / spread.median, 1) for name, spread in durations.items()
        },
        **{name: spread.as_figures() for name, spread in durations.items()},
    }


def _labelled(batch: list[dict[str, Any]], *, prompt_share: float) -> list[dict[str, Any]]:
    """Return the examples of a batch with shifted labels, which are masked in the prompt."""
    examples: list[dict[str, Any]] = []
    for feature in batch:
        ids = np.asarray(feature['input_ids'])
        labels = np.append(ids[1:], IGNORE_INDEX)
        labels[: int(prompt_share * len(ids))] = IGNORE_INDEX
        examples.append({'input_ids': ids, 'labels': labels})
    return examples


def _batches() -> list[list[dict[str, Any]]]:
    dataset = Dataset(DatasetMeta(str(DATA)))
    dataset.set_template('Template', model_id=MODEL, max_length=512)
    dataset.map('SelfCognitionProcessor', init_args={'model_name': 'Bench', 'model_author': 'Bench'})
    dataset.encode()
    rows = [dataset[index] for index in range(3 * BATCH_SIZE)]
    return [rows[begin : begin + BATCH_SIZE] for begin in range(0, len(rows), BATCH_SIZE)]


def _service_step(model: MultiLoraTransformersModel, batch: list[dict[str, Any]]) -> None:
    model.forward_backward(inputs=batch, return_logps=False)
    model.clip_grad_and_step(max_grad_norm=1.0)


def _pipelined_step(model: MultiLoraTransformersModel, batch: list[dict[str, Any]]) -> None:
    """Send the batch and the step without waiting for the result of the batch in between."""
    backward = model.forward_backward.submit(inputs=batch, return_logps=False)
    model.clip_grad_and_step(max_grad_norm=1.0)
    backward.result()


class _BareLoop:
    """A training loop without Twinkle: it pads to the longest example, runs forward and backward, clips and steps."""

    def __init__(self) -> None:
        torch.set_num_threads(THREADS)
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32)
        config = PeftLoraConfig(r=8, lora_alpha=16, target_modules='all-linear', task_type='CAUSAL_LM')
        self._model = get_peft_model(base, config).train()
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._trainable = trainable
        self._optimizer = torch.optim.AdamW(trainable, lr=1e-4)

    def step(self, batch: list[dict[str, Any]]) -> None:
        """Train on a batch. The labels are already shifted, so the loss does not shift them again."""
        length = max(len(feature['input_ids']) for feature in batch)
        ids = _padded(batch, 'input_ids', length, 0)
        labels = _padded(batch, 'labels', length, IGNORE_INDEX)
        mask = _padded([{'ones': np.ones(len(feature['input_ids']))} for feature in batch], 'ones', length, 0)
        logits = self._model(input_ids=ids, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trainable, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _padded(batch: list[dict[str, Any]], name: str, length: int, fill: int) -> torch.Tensor:
    rows = [
        np.pad(np.asarray(row[name], np.int64), (0, length - len(row[name])), constant_values=fill) for row in batch
    ]
    return torch.from_numpy(np.stack(rows))
