"""Tokens a second trained through gateway and model service, against a bare transformers + peft loop.

Both train the same LoRA on the same batches with one torch thread, in turns within one run, so
that what else the machine does falls on both. Tokens are real ones: padding is nobody's work.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.local_stack import THREADS, connected, running_stack
from twinkle.data_format import IGNORE_INDEX, LoraConfig
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.hub import resolve_model
from twinkle_client.model import MultiLoraTransformersModel

MODEL = 'smollm2-135m-instruct'
BATCH_SIZE = 8
ROUNDS = 6
DATA = Path(__file__).parents[1] / 'examples' / 'data' / 'self_cognition.jsonl'


def main() -> dict[str, Any]:
    """Run the comparison and return its figures."""
    batches = _batches()
    bare = _BareLoop()
    seconds: dict[str, list[float]] = {'bare': [], 'service': []}
    with running_stack() as state, connected(state) as client:
        model = MultiLoraTransformersModel(MODEL, client=client)
        model.add_adapter_to_model('bench', LoraConfig(r=8, lora_alpha=16, seed=0))
        model.set_optimizer('AdamW', lr=1e-4)
        steps = {'bare': bare.step, 'service': lambda batch: _service_step(model, batch)}
        for step in steps.values():
            step(batches[0])
        for index in range(ROUNDS):
            for name, step in steps.items():
                begin = time.perf_counter()
                step(batches[index % len(batches)])
                seconds[name].append(time.perf_counter() - begin)
    return _figures(batches, seconds)


def _figures(batches: list[list[dict[str, Any]]], seconds: dict[str, list[float]]) -> dict[str, Any]:
    tokens = [sum(len(feature['input_ids']) for feature in batch) for batch in batches]
    rounds = [tokens[index % len(tokens)] for index in range(ROUNDS)]
    rates = {
        name: statistics.median(count / spent for count, spent in zip(rounds, times, strict=True))
        for name, times in seconds.items()
    }
    padded = [len(batch) * max(len(feature['input_ids']) for feature in batch) for batch in batches]
    return {
        'tokens_per_second': {name: round(rate, 1) for name, rate in rates.items()},
        'service_over_bare': round(rates['service'] / rates['bare'], 3),
        'goal': '>= 1.0',
        'batch_size': BATCH_SIZE,
        'real_tokens_per_batch': tokens,
        'padded_tokens_per_batch_of_bare_loop': padded,
        'threads': THREADS,
        'rounds': ROUNDS,
    }


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


class _BareLoop:
    """What a person would write without Twinkle: pad to the longest, forward, backward, clip, step."""

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
        """Train on a batch; labels come shifted, so the loss is taken without shifting again."""
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
