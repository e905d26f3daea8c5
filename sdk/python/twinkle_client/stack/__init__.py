"""Stacks: the five services as processes on one machine or on a Ray cluster."""

from twinkle_client.stack.hosts import StackError
from twinkle_client.stack.lifecycle import revive_stack, start_stack, stop_stack
from twinkle_client.stack.options import DEFAULT_MODEL, ENGINES, SERVICES, StackOptions
from twinkle_client.stack.samplers import add_sampler, drain_replica, remove_ended
from twinkle_client.stack.spawning import service_of
from twinkle_client.stack.state import ServiceState, StackState, default_state_dir
from twinkle_client.stack.state_folder import StackBusyError

__all__ = [
    'DEFAULT_MODEL',
    'ENGINES',
    'SERVICES',
    'ServiceState',
    'StackBusyError',
    'StackError',
    'StackOptions',
    'StackState',
    'add_sampler',
    'default_state_dir',
    'drain_replica',
    'remove_ended',
    'revive_stack',
    'service_of',
    'start_stack',
    'stop_stack',
]
