"""Conversion of steps and chats between messages and values."""

import pytest
from google.protobuf.struct_pb2 import Struct

from fixtures.data_service import chat
from twinkle.api.data.v1 import message_pb2
from twinkle_services.data.api.convert_chats import row_from_trajectory, trajectory_of_row
from twinkle_services.data.api.convert_steps import step_to_proto, steps_from_proto
from twinkle_services.data.domain import CheckStep, EncodeStep, FilterStep, MapStep, PackStep, Step, TemplateStep
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import dict_from_struct


@pytest.mark.parametrize(
    'step',
    [
        MapStep(preprocessor='SelfCognitionProcessor', init_args={'model_name': 'a', 'model_author': 'b'}),
        FilterStep(filter='TextLengthFilter', init_args={'column': 'x', 'min_characters': 3}),
        FilterStep(filter='DedupFilter', init_args={'threshold': 1}),
        MapStep(preprocessor='QualityPreprocessor',
                init_args={'pipeline': ['HardFilter', {'name': 'DedupFilter', 'init_args': {'memory': 9}}]}),
        TemplateStep(base_model='m'),
        TemplateStep(base_model='m', name='Qwen3_5Template', max_length=9, truncation_strategy='split',
                     default_system='', is_thinking_enabled=False),
        EncodeStep(is_generation_prompt_added=True),
        PackStep(),
        CheckStep(),
    ],
)  # fmt: skip
def test_steps_survive_a_round_trip(step: Step) -> None:
    """A step that is converted to a message and back is unchanged."""
    assert steps_from_proto([step_to_proto(step)]) == (step,)


def test_paths_on_the_server_are_refused() -> None:
    """A caller cannot make a preprocessor write a log file on the server."""
    step = MapStep(preprocessor='QualityPreprocessor', init_args={'dropped_log_path': 'log.jsonl'})
    with pytest.raises(InvalidField) as caught:
        steps_from_proto([step_to_proto(step)])
    assert caught.value.field == 'steps[0].map.init_args'


def full_trajectory() -> message_pb2.Trajectory:
    """Return a chat with tools, a tool call and its result, reasoning and user data."""
    trajectory = chat('question', 'answer', 'thanks')
    trajectory.messages[1].reasoning_content = 'think'
    call = trajectory.messages[1].tool_calls.add(tool_call_id='c', name='add')
    call.arguments.update({'a': [1, 2]})
    trajectory.messages.insert(2, message_pb2.Message(role=message_pb2.ROLE_TOOL, tool_call_id='c'))
    trajectory.messages[2].parts.add(text='3')
    trajectory.tools.add(name='add', description='adds').parameters.update({'type': 'object'})
    trajectory.user_data['truth'].number_value = 3
    return trajectory


def test_chats_survive_a_round_trip() -> None:
    """A chat keeps its tools, tool calls, reasoning and user data."""
    trajectory = full_trajectory()
    assert trajectory_of_row(row_from_trajectory(trajectory, 'x')) == trajectory


def test_other_columns_become_user_data() -> None:
    """The user data of a chat contains the other columns of its row, except the token columns."""
    row = {'messages': [{'role': 'user', 'content': 'u'}], 'target': 24, 'input_ids': [1]}
    assert dict_from_struct(Struct(fields=dict(trajectory_of_row(row).user_data))) == {'target': 24}


def test_unsupported_and_malformed_parts_are_refused_by_field() -> None:
    """The error for media, or for a malformed part of a chat, has the field path of that part."""
    cases: dict[str, message_pb2.Trajectory] = {}
    with_image = chat('u')
    with_image.messages[0].parts.add().image.media_type = 'image/png'
    cases['t.messages[0].parts[1]'] = with_image
    with_empty = chat('u')
    with_empty.messages[0].parts.add()
    cases['t.messages[0].parts[1]!'] = with_empty  # The mark makes the key unique; the path ends before it.
    without_parts = chat('u')
    del without_parts.messages[0].parts[:]
    cases['t.messages[0].parts'] = without_parts
    nameless_call = chat('u', 'a')
    nameless_call.messages[1].tool_calls.add()
    cases['t.messages[1].tool_calls[0].name'] = nameless_call
    nameless_tool = chat('u')
    nameless_tool.tools.add()
    cases['t.tools[0].name'] = nameless_tool
    late_system = chat('u', 'a')
    late_system.messages[1].role = message_pb2.ROLE_SYSTEM
    cases['t.messages[1].role'] = late_system
    for field, trajectory in cases.items():
        with pytest.raises(InvalidField) as caught:
            row_from_trajectory(trajectory, 't')
        assert caught.value.field == field.rstrip('!')
