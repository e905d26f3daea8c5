"""Adapters co-batched in the trainer's engine against one after the other, and the same through the service.

`./run bench co_batch --help` tells of other models, devices and numbers of adapters: on an accelerator the random
models of `benchmarks.random_model`, with tokens a second and the share of the machine's peak.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.local_stack import connected, running_stack
from benchmarks.random_model import SIZES, build_random_model
from benchmarks.turns import Spread, ratio_by_round, time_in_turns
from twinkle.data_format import LoraConfig
from twinkle.hub import resolve_model
from twinkle.model.engine import BatchItem, TrainerEngine
from twinkle.nn import PackedCausalLM
from twinkle.nn.attention import IMPLEMENTATION
from twinkle_client.model import MultiLoraTransformersModel

_FLOPS_PER_PARAMETER = 4
"""Two for the forward pass and two for the gradient of the activations; frozen weights have none."""


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the comparison and return its figures."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    model = _packed_model(options)
    engine = TrainerEngine(model, max_pass_tokens=options.pass_tokens)
    bare = _bare_model(options) if options.peft else None
    for index in range(max(options.adapters)):
        engine.create_adapter(_name(index), LoraConfig(r=options.lora_rank, lora_alpha=16, seed=index))
    figures: dict[str, Any] = {'options': vars(options), 'goal': '>= 2.5 for 8 adapters of 64 tokens'}
    for count in options.adapters:
        figures[f'engine_{count}_adapters'] = {
            str(length): _engine_figures(engine, bare, options, count=count, length=length) for length in options.tokens
        }
    if options.service:
        figures['service'] = _service_figures(options)
    return figures


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='./run bench co_batch')
    parser.add_argument('--model', default='smollm2-135m-instruct', help=f'hub id, alias, folder, or one of {[*SIZES]}')
    parser.add_argument('--adapters', type=int, nargs='+', default=[8])
    parser.add_argument('--tokens', type=int, nargs='+', default=[16, 32, 64, 128, 256], help='of each adapter')
    parser.add_argument('--lora-rank', type=int, default=8)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--dtype', default='float32')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--pass-tokens', type=int, default=1024, help='most of one pass')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--peak-flops', type=float, default=0.0, help='of the machine, a second; 0: unknown')
    parser.add_argument('--peft', action='store_true', help='compare with transformers and peft, too')
    parser.add_argument('--service', action='store_true', help='measure through gateway and model service, too')
    return parser.parse_args(arguments)


def _packed_model(options: argparse.Namespace) -> PackedCausalLM:
    if options.model in SIZES:
        built = build_random_model(options.model, device=options.device, dtype=options.dtype, attention=IMPLEMENTATION)
        return PackedCausalLM(built)
    return PackedCausalLM.load(resolve_model(options.model), dtype=options.dtype, device=options.device)


def _bare_model(options: argparse.Namespace) -> Any:
    if options.model in SIZES:
        base = build_random_model(options.model, device=options.device, dtype=options.dtype, attention='sdpa')
    else:
        base = AutoModelForCausalLM.from_pretrained(resolve_model(options.model), dtype=getattr(torch, options.dtype))
    config = PeftLoraConfig(r=options.lora_rank, lora_alpha=16, target_modules='all-linear', task_type='CAUSAL_LM')
    return get_peft_model(base.to(options.device), config).train()


def _engine_figures(
    engine: TrainerEngine, bare: Any, options: argparse.Namespace, *, count: int, length: int
) -> dict[str, Any]:
    items = [
        BatchItem(
            adapter_id=_name(index), features=[_feature(engine.model.vocab_size, length, index)], is_training=True
        )
        for index in range(count)
    ]
    runs = {
        'together': lambda: _train(engine, items),
        'alone': lambda: [_train(engine, [item]) for item in items],
    }
    if bare is not None:
        runs['peft'] = lambda: [_train_bare(bare, item, options.device) for item in items]
    spent = time_in_turns(runs, rounds=options.rounds, finish=_finish_of(options.device))
    return {
        'together_over_one_after_the_other': ratio_by_round(spent['alone'], spent['together']),
        **({'together_over_peft': ratio_by_round(spent['peft'], spent['together'])} if bare is not None else {}),
        **{name: _rates(engine, options, spread, count * length) for name, spread in spent.items()},
    }


def _rates(engine: TrainerEngine, options: argparse.Namespace, spread: Spread, tokens: int) -> dict[str, float]:
    rate = tokens / spread.median
    figures = {'tokens_per_second': round(rate, 1), **spread.as_figures()}
    if options.peak_flops:
        # Looking an embedding up multiplies nothing; a tied one is counted once, as the head.
        config = engine.model.config
        looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        flops = _FLOPS_PER_PARAMETER * (engine.model.parameter_count - looked_up)
        figures['model_flops_utilisation'] = round(rate * flops / options.peak_flops, 4)
    return figures


def _train(engine: TrainerEngine, items: Sequence[BatchItem]) -> None:
    for result in engine.run_batch(items):
        if isinstance(result, Exception):
            raise result
    for item in items:
        engine.zero_grad(item.adapter_id)


def _train_bare(model: Any, item: BatchItem, device: str) -> None:
    ids, labels = (
        torch.as_tensor(np.stack([feature[name] for feature in item.features]), device=device, dtype=torch.int64)
        for name in ('input_ids', 'labels')
    )
    logits = model(input_ids=ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()
    model.zero_grad()


def _service_figures(options: argparse.Namespace) -> dict[str, Any]:
    """Compare as many clients at once with one after the other, through gateway and model service."""
    count = options.adapters[0]
    with running_stack() as state, connected(state) as client:
        model = MultiLoraTransformersModel(options.model, client=client)
        for index in range(count):
            model.add_adapter_to_model(_name(index), LoraConfig(r=options.lora_rank, lora_alpha=16, seed=index))
        return {str(length): _service_ratio(model, options, count=count, length=length) for length in options.tokens}


def _service_ratio(
    model: MultiLoraTransformersModel, options: argparse.Namespace, *, count: int, length: int
) -> dict[str, Any]:
    features = {_name(index): _feature(10_000, length, index) for index in range(count)}

    def together() -> None:
        calls = [
            model.forward_backward.submit([feature], adapter_name=name, return_logps=False)
            for name, feature in features.items()
        ]
        for call in calls:
            call.result()

    def alone() -> None:
        for name, feature in features.items():
            model.forward_backward([feature], adapter_name=name, return_logps=False)

    spent = time_in_turns({'together': together, 'alone': alone}, rounds=options.rounds)
    return {
        'together_over_one_after_the_other': ratio_by_round(spent['alone'], spent['together']),
        'tokens_per_second': round(count * length / spent['together'].median, 1),
    }


def _feature(vocabulary: int, length: int, seed: int) -> dict[str, Any]:
    ids = np.random.default_rng(seed).integers(3, vocabulary, length + 1)
    return {'input_ids': ids[:-1], 'labels': ids[1:]}


def _finish_of(device: str) -> Any:
    return torch.cuda.synchronize if device.startswith('cuda') else None


def _name(index: int) -> str:
    return f'bench-{index}'
