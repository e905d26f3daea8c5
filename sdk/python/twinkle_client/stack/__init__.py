"""The five services on one machine: started, found, shown and stopped."""

from twinkle_client.stack.launcher import StackBusyError, StackError, revive_stack, start_stack, stop_stack
from twinkle_client.stack.options import DEFAULT_MODEL, SERVICES, StackOptions
from twinkle_client.stack.state import ServiceState, StackState, default_state_dir

__all__ = [
    'DEFAULT_MODEL',
    'SERVICES',
    'ServiceState',
    'StackBusyError',
    'StackError',
    'StackOptions',
    'StackState',
    'default_state_dir',
    'revive_stack',
    'start_stack',
    'stop_stack',
]
