"""Compare shared passes of several adapters with separate passes in the engine, and optionally through the services.

`./run bench co_batch --help` lists options for other models, devices and numbers of adapters. On an accelerator, use
the random models of `benchmarks.random_model`. The figures include tokens per second and, with `--peak-flops`, the
utilization of the machine's peak.
"""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.random_model import SIZES, build_random_model
from benchmarks.timing import Spread, ratio_by_round, time_alternately
from twinkle.data_format import LoraConfig
from twinkle.hub import resolve_model
from twinkle.model.engine import BatchItem, TrainerEngine
from twinkle.nn import PackedCausalLM
from twinkle.nn.attention import IMPLEMENTATION

TOKEN_IDS = 300
"""Upper bound of the token ids in batches for a service, exclusive; smaller than the vocabulary of every model."""
_FLOPS_PER_PARAMETER = 4
"""Floating-point operations per parameter and token: two in the forward pass and two for the gradient of the
activations. Frozen weights have no gradient."""


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the comparison and return its figures."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    model = packed_model(options)
    engine = TrainerEngine(model, max_pass_tokens=options.pass_tokens)
    # A machine that runs only the engine may lack peft and the dependencies of the services.
    bare = importlib.import_module('benchmarks.bare_peft').BarePeft(options) if options.peft else None
    for index in range(max(options.adapters)):
        engine.create_adapter(adapter_name(index), LoraConfig(r=options.lora_rank, lora_alpha=16, seed=index))
    figures: dict[str, Any] = {'options': vars(options), 'goal': '>= 2.5 for 8 adapters of 64 tokens'}
    for count in options.adapters:
        figures[f'engine_{count}_adapters'] = {
            str(length): _engine_figures(engine, bare, options, count=count, length=length) for length in options.tokens
        }
    if options.service:
        figures['service'] = importlib.import_module('benchmarks.co_batch_service').measure(options)
    return figures


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='./run bench co_batch')
    parser.add_argument('--model', default='smollm2-135m-instruct', help=f'hub id, alias, folder, or one of {[*SIZES]}')
    parser.add_argument('--adapters', type=int, nargs='+', default=[8])
    parser.add_argument('--tokens', type=int, nargs='+', default=[16, 32, 64, 128, 256], help='tokens per adapter')
    parser.add_argument('--lora-rank', type=int, default=8)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--dtype', default='float32')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--pass-tokens', type=int, default=1024, help='maximum number of tokens per pass')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--peak-flops', type=float, default=0.0, help='peak of the machine in FLOP/s; 0 if unknown')
    parser.add_argument('--peft', action='store_true', help='also compare with transformers and peft')
    parser.add_argument('--service', action='store_true', help='also measure through gateway and model service')
    return parser.parse_args(arguments)


def packed_model(options: argparse.Namespace) -> PackedCausalLM:
    """Return the model that the options `model`, `device` and `dtype` select."""
    if options.model in SIZES:
        built = build_random_model(options.model, device=options.device, dtype=options.dtype, attention=IMPLEMENTATION)
        return PackedCausalLM(built)
    return PackedCausalLM.load(resolve_model(options.model), dtype=options.dtype, device=options.device)


def _engine_figures(
    engine: TrainerEngine, bare: Any, options: argparse.Namespace, *, count: int, length: int
) -> dict[str, Any]:
    items = [
        BatchItem(
            adapter_id=adapter_name(index),
            features=[random_feature(engine.model.vocab_size, length, index)],
            is_training=True,
        )
        for index in range(count)
    ]
    runs = {
        'together': lambda: _train(engine, items),
        'alone': lambda: [_train(engine, [item]) for item in items],
    }
    if bare is not None:
        runs['peft'] = lambda: [bare.train(item.features) for item in items]
    durations = time_alternately(runs, rounds=options.rounds, finish=finish_of(options.device))
    return {
        'together_over_one_after_the_other': ratio_by_round(durations['alone'], durations['together']),
        **(
            {'together_over_peft': ratio_by_round(durations['peft'], durations['together'])} if bare is not None else {}
        ),
        **{name: _rates(engine, options, spread, count * length) for name, spread in durations.items()},
    }


def _rates(engine: TrainerEngine, options: argparse.Namespace, spread: Spread, tokens: int) -> dict[str, float]:
    rate = tokens / spread.median
    figures = {'tokens_per_second': round(rate, 1), **spread.as_figures()}
    if options.peak_flops:
        # Embedding lookups need no multiplications. A tied embedding is counted once, as the head.
        config = engine.model.config
        embedding_size = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        flops = _FLOPS_PER_PARAMETER * (engine.model.parameter_count - embedding_size)
        figures['model_flops_utilisation'] = round(rate * flops / options.peak_flops, 4)
    return figures


def _train(engine: TrainerEngine, items: Sequence[BatchItem]) -> None:
    for result in engine.run_batch(items):
        if isinstance(result, Exception):
            raise result
    for item in items:
        engine.zero_grad(item.adapter_id)


def random_feature(vocabulary: int, length: int, seed: int) -> dict[str, Any]:
    """Return an example of random tokens, int64 [length], with a label at every position."""
    ids = np.random.default_rng(seed).integers(3, vocabulary, length + 1)
    return {'input_ids': ids[:-1], 'labels': ids[1:]}


def finish_of(device: str) -> Any:
    """Return the function that waits for a device; None for the CPU."""
    return torch.cuda.synchronize if device.startswith('cuda') else None


def adapter_name(index: int) -> str:
    return f'bench-{index}'
