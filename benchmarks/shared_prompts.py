"""Compare training that computes a common prompt once with training that computes the prompt for each sample.

`./run bench shared_prompts --help` lists options for other models and devices. Both variants train the same batches on
the same model, alternately. The clock is CPU time on a CPU, and wall time on an accelerator. The figures state whether
all log-probabilities are bitwise equal, and the relative difference of the gradients.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.co_batch import finish_of, packed_model
from benchmarks.random_model import SIZES
from benchmarks.timing import ratio_by_round, time_alternately
from twinkle.data_format import InputFeature, LoraConfig
from twinkle.model.engine import BatchResult, TrainerEngine
from twinkle.nn import PackedCausalLM

CASES = {
    'four prompts of 48 tokens, 8 samples of 8 to 12': (4, 8, 48, (8, 12)),
    'two prompts of 64 tokens, 8 samples of 17 to 32': (2, 8, 64, (17, 32)),
    'one prompt of 128 tokens, 8 samples of 16': (1, 8, 128, (16, 16)),
    'one prompt of 256 tokens, 8 samples of 32': (1, 8, 256, (32, 32)),
    'one prompt of 32 tokens, 8 samples of 128': (1, 8, 32, (128, 128)),
    'one prompt of 16 tokens, 4 samples of 300': (1, 4, 16, (300, 300)),
}
"""Prompts, samples per prompt, tokens per prompt, and minimum and maximum tokens of a sample, by name."""
ADAPTER = 'adapter'


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the comparison and return its figures."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    model = packed_model(options)
    figures: dict[str, Any] = {'options': vars(options), 'goal': '>= 3 for prompts of 48 tokens'}
    for name, case in [*CASES.items()][: options.cases]:
        figures[name] = _compare(model, _features(case, vocabulary=model.vocab_size), options)
    return figures


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='./run bench shared_prompts')
    parser.add_argument('--model', default='smollm2-135m-instruct', help=f'hub id, alias, folder, or one of {[*SIZES]}')
    parser.add_argument('--lora-rank', type=int, default=16)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--dtype', default='float32')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--pass-tokens', type=int, default=1024, help='maximum number of rows of a pass')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--cases', type=int, default=len(CASES), help='number of cases to run, from the first case')
    return parser.parse_args(arguments)


def _features(case: tuple[int, int, int, tuple[int, int]], *, vocabulary: int) -> list[InputFeature]:
    """Return random samples of random prompts, with random advantages and a constant old log-probability."""
    prompt_count, sample_count, prompt_length, (shortest, longest) = case
    rng = np.random.default_rng(0)
    features: list[InputFeature] = []
    for _ in range(prompt_count):
        prompt = rng.integers(3, vocabulary, prompt_length)
        for index in range(sample_count):
            length = shortest + index % (longest - shortest + 1)
            ids = np.concatenate([prompt, rng.integers(3, vocabulary, length)])
            labels = ids[1:].copy()
            labels[: prompt_length - 1] = -100
            features.append(
                InputFeature(
                    input_ids=ids[:-1],
                    labels=labels,
                    advantages=np.full(len(labels), rng.standard_normal(), np.float32),
                    old_logps=np.full(len(labels), -9.0, np.float32),
                )
            )
    return features


def _compare(model: PackedCausalLM, features: Sequence[InputFeature], options: argparse.Namespace) -> dict[str, Any]:
    engines = {name: _engine(model, options) for name in ('shared', 'separate')}

    def train(name: str) -> BatchResult:
        model.can_share_prefixes = name == 'shared'
        return engines[name].forward_backward(ADAPTER, features)

    results = {name: train(name) for name in engines}
    gradients = {name: _gradient(engine) for name, engine in engines.items()}
    times = time_alternately(
        {name: partial(train, name) for name in engines},
        rounds=options.rounds,
        finish=finish_of(options.device),
        clock=time.process_time if options.device == 'cpu' else time.perf_counter,
    )
    tokens, shared = results['shared'].token_count, results['shared'].shared_token_count
    difference = (gradients['shared'] - gradients['separate']).norm() / gradients['separate'].norm()
    return {
        'separate_over_shared': ratio_by_round(times['separate'], times['shared']),
        'tokens_over_rows': round(tokens / (tokens - shared), 2),
        'passes': {name: result.pass_count for name, result in results.items()},
        'is_every_logprob_equal': all(
            np.array_equal(*pair) for pair in zip(results['shared'].logps, results['separate'].logps, strict=True)
        ),
        'relative_gradient_difference': float(difference),
    }


def _engine(model: PackedCausalLM, options: argparse.Namespace) -> TrainerEngine:
    engine = TrainerEngine(model, max_pass_tokens=options.pass_tokens)
    engine.create_adapter(ADAPTER, LoraConfig(r=options.lora_rank, lora_alpha=32, seed=0))
    engine.set_loss(ADAPTER, 'GRPOLoss')
    return engine


def _gradient(engine: TrainerEngine) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten().double() for parameter in engine.adapter(ADAPTER).parameters()])
