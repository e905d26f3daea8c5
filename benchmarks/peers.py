"""Compares the Tinker SDK with a plain program on the same work: training with peft, and sampling with HF generate.

By default, the stack uses the number of threads that `twinkle up` chooses, and the plain program uses all cores;
`--threads` sets the number of both. The plain program loads the base model in float32. The stack also uses float32, or
selects the type itself with `--dtype auto`.
`./run bench peers --help` lists the options.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tinker
import torch

from benchmarks.bare_peft import BarePeft
from benchmarks.local_stack import default_device, running_stack
from benchmarks.timing import ratio_by_round, time_alternately
from twinkle.data_format import IGNORE_INDEX
from twinkle_client.stack.options import DEFAULT_MODEL

EXAMPLES, EXAMPLE_TOKENS = 8, 128
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 32, 32
ADAPTERS = 8
GOALS = {
    'float32': {'all_labels': '>= 1.0', 'half_of_the_labels': '>= 1.2'},
    'auto': {'all_labels': '>= 1.5', 'half_of_the_labels': '>= 1.9'},
}
"""Goals for the ratio of training, by the data type of the stack."""


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the comparison and return its figures."""
    options = _parse(arguments)
    # Another benchmark in this process may have set the number of threads.
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    plain = _Plain(options)
    with (
        running_stack(
            options.model,
            engine=options.engine,
            dtype=options.dtype,
            threads=options.threads,
            services={'model': {'device': options.device}},
        ) as stack,
        tinker.ServiceClient(base_url=stack.http_url, api_key=stack.read_api_key()) as client,
    ):
        ours = _Ours(client, stack.base_model, options)
        figures: dict[str, Any] = {
            'options': vars(options),
            'threads_of_the_plain_program': torch.get_num_threads(),
        }
        if 'training' in options.parts:
            figures['training'] = {
                name: _compare_training(ours, plain, options, masked=masked, goal=goal)
                for (name, goal), masked in zip(GOALS[options.dtype].items(), (0.0, 0.5), strict=True)
            }
        if 'sampling' in options.parts:
            figures['sampling'] = _compare_sampling(ours, plain, options)
        return figures


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='./run bench peers')
    parser.add_argument('--model', default=DEFAULT_MODEL, help='hub id, alias or folder')
    parser.add_argument('--dtype', default='float32', choices=tuple(GOALS), help='data type of the stack')
    parser.add_argument('--engine', default='auto', help='sampling engine: auto, vllm or torch')
    parser.add_argument('--device', default=default_device(), help='device of both programs')
    parser.add_argument('--lora-rank', type=int, default=16)
    parser.add_argument('--threads', type=int, help='number of threads of each side; by default, the usual ones')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--parts', nargs='+', default=('training', 'sampling'), choices=('training', 'sampling'))
    return parser.parse_args(arguments)


def _compare_training(
    ours: '_Ours', plain: '_Plain', options: argparse.Namespace, *, masked: float, goal: str
) -> dict[str, Any]:
    tokens = np.random.default_rng(0).integers(100, 40_000, (EXAMPLES, EXAMPLE_TOKENS + 1))
    weights = np.ones((EXAMPLES, EXAMPLE_TOKENS), np.float32)
    weights[:, : int(masked * EXAMPLE_TOKENS)] = 0.0
    times = time_alternately(
        {'ours': partial(ours.train, tokens, weights), 'peft': partial(plain.train, tokens, weights)},
        rounds=options.rounds,
    )
    return {
        'ours_over_peft': ratio_by_round(times['peft'], times['ours']),
        'goal': goal,
        **{name: spread.as_figures() for name, spread in times.items()},
    }


def _compare_sampling(ours: '_Ours', plain: '_Plain', options: argparse.Namespace) -> dict[str, Any]:
    prompts = np.random.default_rng(1).integers(100, 40_000, (PROMPTS, PROMPT_TOKENS)).tolist()
    eight = ours.samplers(ADAPTERS)
    one = eight[:1]
    times = time_alternately(
        {
            'one_adapter': partial(ours.sample, one, prompts),
            'eight_adapters': partial(ours.sample, eight, prompts),
            'generate': partial(plain.sample, prompts),
        },
        rounds=options.rounds,
    )
    expected = 2 * PROMPTS * NEW_TOKENS * (options.rounds + 1)
    if ours.token_count < 0.99 * expected:
        raise RuntimeError(
            f'{ours.token_count} tokens were sampled instead of {expected}, so the times cannot be compared'
        )
    return {
        'one_adapter_over_generate': ratio_by_round(times['generate'], times['one_adapter']),
        'goal': '>= 1.4',
        'eight_adapters_over_one': ratio_by_round(times['one_adapter'], times['eight_adapters']),
        'goal_of_eight': '>= 0.8',
        **{name: spread.as_figures() for name, spread in times.items()},
    }


class _Ours:
    """The program of a user of the Tinker SDK."""

    def __init__(self, client: tinker.ServiceClient, base_model: str, options: argparse.Namespace) -> None:
        self._new_model = partial(
            client.create_lora_training_client, base_model, rank=options.lora_rank, train_unembed=False
        )
        self._model = self._new_model(seed=0).result()
        self.token_count = 0

    def train(self, tokens: np.ndarray, weights: np.ndarray) -> None:
        """Take one step on int64 [B, T + 1] tokens with float32 [B, T] weights."""
        _train(self._model, tokens, weights)

    def samplers(self, count: int) -> list[tinker.SamplingClient]:
        """Return sampling clients of `count` adapters, each trained for one step, so that no adapter is zero."""
        models = [self._new_model(seed=seed).result() for seed in range(count)]
        tokens = np.random.default_rng(2).integers(100, 40_000, (1, PROMPT_TOKENS + 1))
        for model in models:
            _train(model, tokens, np.ones((1, PROMPT_TOKENS), np.float32))
        return [model.save_weights_and_get_sampling_client().result() for model in models]

    def sample(self, samplers: Sequence[tinker.SamplingClient], prompts: list[list[int]]) -> None:
        """Continue all prompts concurrently; the adapters are assigned to the prompts in rotation."""
        params = tinker.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0)
        calls = [
            samplers[index % len(samplers)].sample(tinker.ModelInput.from_ints(prompt), 1, params)
            for index, prompt in enumerate(prompts)
        ]
        self.token_count += sum(len(call.result().sequences[0].tokens) for call in calls)


def _train(model: tinker.TrainingClient, tokens: np.ndarray, weights: np.ndarray) -> None:
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={'target_tokens': row[1:], 'weights': weight},
        )
        for row, weight in zip(tokens, weights, strict=True)
    ]
    backward = model.forward_backward(data, 'cross_entropy')
    step = model.optim_step(tinker.AdamParams(learning_rate=1e-4))
    backward.result()
    step.result()


class _Plain:
    """The same work with transformers and peft in this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self._bare = BarePeft(argparse.Namespace(**{**vars(options), 'dtype': 'float32'}))
        self._device = options.device
        trainable = [parameter for parameter in self._bare.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trainable, lr=1e-4)

    def train(self, tokens: np.ndarray, weights: np.ndarray) -> None:
        """Take one step on int64 [B, T + 1] tokens; targets with weight 0 have no loss, all others have weight 1."""
        self._bare.model.train()
        labels = np.where(weights > 0, tokens[:, 1:], IGNORE_INDEX)
        self._bare.backward(
            [{'input_ids': row[:-1], 'labels': label} for row, label in zip(tokens, labels, strict=True)]
        )
        self._optimizer.step()
        self._optimizer.zero_grad()

    def sample(self, prompts: list[list[int]]) -> None:
        """Continue all prompts as one batch."""
        ids = torch.as_tensor(prompts, device=self._device)
        self._bare.model.eval()
        self._bare.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
