"""The five services on one machine: started, found, shown and stopped."""

from twinkle_client.stack.state import ServiceState, StackState, default_state_dir

__all__ = ['ServiceState', 'StackState', 'default_state_dir']
