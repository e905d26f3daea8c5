"""Messages with too many options are refused, and large messages are converted outside the event loop."""

import threading

import pytest
from google.protobuf.message import Message

from twinkle.api.model.v1 import training_config_pb2 as wire
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.message_bounds import (
    MAX_LIST_ITEMS,
    MAX_OPTION_BYTES,
    THREAD_BYTES,
    check_options,
    convert_large,
)

SCHEDULER = 'training_config.lr_scheduler.options'


def schedule(**options: object) -> wire.TrainingConfig:
    """Return a configuration whose scheduler has these options."""
    return wire.TrainingConfig(lr_scheduler=wire.SchedulerConfig(name='MultiStepLR', options=struct_of(options)))


def components(count: int) -> wire.TrainingConfig:
    """Return a configuration with many metrics."""
    return wire.TrainingConfig(metrics=[wire.ComponentConfig(name='a')] * count)


@pytest.mark.parametrize(
    ('message', 'field'),
    [
        (schedule(milestones=list(range(MAX_LIST_ITEMS + 1))), f'{SCHEDULER}.milestones'),
        (schedule(milestones=list(range(100_000))), SCHEDULER),
        (schedule(nested={'a': [[0] * (MAX_LIST_ITEMS + 1)]}), f'{SCHEDULER}.nested.a[0]'),
        (schedule(text='x' * MAX_OPTION_BYTES), SCHEDULER),
        (schedule(**{f'option{index}': 'x' * 100 for index in range(1000)}), SCHEDULER),
        (components(MAX_LIST_ITEMS + 1), 'training_config.metrics'),
        (components(MAX_OPTION_BYTES), 'training_config'),
    ],
)
def test_too_many_options_are_refused_by_field(message: Message, field: str) -> None:
    """A list with too many items, or too many bytes, is refused with the path of the field."""
    with pytest.raises(InvalidField) as refusal:
        check_options(message, 'training_config')
    assert refusal.value.field == field


@pytest.mark.parametrize(
    'message',
    [schedule(milestones=list(range(MAX_LIST_ITEMS))), schedule(text='x' * 60_000), components(MAX_LIST_ITEMS)],
)
def test_options_at_the_limit_are_accepted(message: Message) -> None:
    """Lists of the maximum length and options below the maximum size are accepted."""
    check_options(message, 'training_config')


async def test_large_messages_are_converted_in_a_thread() -> None:
    """Only large messages are converted in a thread, because starting one takes longer than a small conversion."""
    small, large = [
        await convert_large(lambda _: threading.current_thread(), schedule(text='x' * size))
        for size in (10, THREAD_BYTES)
    ]
    assert small is threading.current_thread()
    assert large is not small
