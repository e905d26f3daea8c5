"""The measurement of `co_batch` through gateway and model service."""

import argparse
from typing import Any

from benchmarks.co_batch import TOKEN_IDS, adapter_name, random_feature
from benchmarks.local_stack import connected, running_stack
from benchmarks.timing import ratio_by_round, time_alternately
from twinkle.data_format import LoraConfig
from twinkle_client.model import MultiLoraTransformersModel


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare concurrent with sequential requests of the same `options.adapters[0]` adapters."""
    count = options.adapters[0]
    with running_stack(options.model) as state, connected(state) as client:
        model = MultiLoraTransformersModel(options.model, client=client)
        for index in range(count):
            model.add_adapter_to_model(adapter_name(index), LoraConfig(r=options.lora_rank, lora_alpha=16, seed=index))
        return {str(length): _ratio(model, options, count=count, length=length) for length in options.tokens}


def _ratio(
    model: MultiLoraTransformersModel, options: argparse.Namespace, *, count: int, length: int
) -> dict[str, Any]:
    features = {adapter_name(index): random_feature(TOKEN_IDS, length, index) for index in range(count)}

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

    durations = time_alternately({'together': together, 'alone': alone}, rounds=options.rounds)
    return {
        'together_over_one_after_the_other': ratio_by_round(durations['alone'], durations['together']),
        'tokens_per_second': round(count * length / durations['together'].median, 1),
    }
