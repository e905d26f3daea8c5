"""The part of `co_batch` that goes through gateway and model service."""

import argparse
from typing import Any

from benchmarks.co_batch import adapter_name, random_feature
from benchmarks.local_stack import connected, running_stack
from benchmarks.turns import ratio_by_round, time_in_turns
from twinkle.data_format import LoraConfig
from twinkle_client.model import MultiLoraTransformersModel

_TOKEN_IDS = 300
"""Below the vocabulary of any model."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare as many clients at once with one after the other, through gateway and model service."""
    count = options.adapters[0]
    with running_stack(options.model) as state, connected(state) as client:
        model = MultiLoraTransformersModel(options.model, client=client)
        for index in range(count):
            model.add_adapter_to_model(adapter_name(index), LoraConfig(r=options.lora_rank, lora_alpha=16, seed=index))
        return {str(length): _ratio(model, options, count=count, length=length) for length in options.tokens}


def _ratio(
    model: MultiLoraTransformersModel, options: argparse.Namespace, *, count: int, length: int
) -> dict[str, Any]:
    features = {adapter_name(index): random_feature(_TOKEN_IDS, length, index) for index in range(count)}

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
