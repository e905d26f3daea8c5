"""Converts between chats and rows; the user data of a chat becomes a column of its row."""

import json

from twinkle.api.data.v1 import message_pb2
from twinkle.data_format import user_data_values
from twinkle_services.data.domain import TOKEN_COLUMNS, Row
from twinkle_services.kit.rpc.chats import chat_from_proto, chat_to_proto
from twinkle_services.kit.rpc.json_values import value_from_proto, value_to_proto

_CHAT_COLUMNS = ('messages', 'tools', 'user_data')


def row_from_trajectory(trajectory: message_pb2.Trajectory, field: str) -> Row:
    """Convert a chat to a row.

    Args:
        trajectory: The chat.
        field: Field path of the chat; prefix of the field paths in errors.

    Raises:
        InvalidField: A part of the chat is empty, malformed or not supported.
    """
    row: Row = chat_from_proto(trajectory, field)
    if trajectory.user_data:
        pairs = sorted(trajectory.user_data.items())
        row['user_data'] = [[name, json.dumps(value_from_proto(value), ensure_ascii=False)] for name, value in pairs]
    return row


def trajectory_of_row(row: Row) -> message_pb2.Trajectory:
    """Return the chat of an encoded row; the `user_data` and the other columns of the row become its user data."""
    trajectory = chat_to_proto(row.get('messages', []), row.get('tools') or [])
    others = {name: value for name, value in row.items() if name not in (*_CHAT_COLUMNS, *TOKEN_COLUMNS)}
    for name, value in {**others, **user_data_values(row)}.items():
        trajectory.user_data[name].CopyFrom(value_to_proto(value))
    return trajectory
