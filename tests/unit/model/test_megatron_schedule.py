"""Options of Megatron's default schedule."""

import re
from typing import Any

import pytest

from twinkle.component import InvalidComponentOptions
from twinkle.model.megatron import default_schedule


def test_default_schedule_is_a_cosine_without_warm_up() -> None:
    """The default schedule is a cosine without warm-up, and `lr_decay_steps` includes the warm-up steps."""
    assert default_schedule(1e-3, lr_decay_steps=100, max_lr=1e-3) == (
        'CosineWarmupScheduler',
        {'num_warmup_steps': 0, 'num_training_steps': 100},
    )
    assert default_schedule(1e-3, lr_decay_steps=100, lr_warmup_steps=10, lr_decay_style='linear') == (
        'LinearWarmupScheduler',
        {'num_warmup_steps': 10, 'num_training_steps': 100},
    )


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({}, 'lr_decay_steps is missing'),
        ({'lr_decay_steps': 10, 'steps': 1}, "unknown options ['steps']"),
        ({'lr_decay_steps': 10, 'lr_decay_style': 'WSD'}, 'lr_decay_style must be one of'),
        ({'lr_decay_steps': 10, 'max_lr': 1e-2}, 'max_lr must be the learning rate of the optimizer, 0.001'),
        ({'lr_decay_steps': 10, 'min_lr': 1e-5}, 'min_lr must be 0'),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Missing, unknown and unsupported options are refused with an error that names the option."""
    with pytest.raises(InvalidComponentOptions, match=re.escape(message)):
        default_schedule(1e-3, **options)
