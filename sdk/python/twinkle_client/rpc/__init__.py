"""The wire: one connection, four shapes of calls, and the two faces every remote verb has.

Everything is written once, as coroutines that run on the connection's own event loop;
`faces` makes the blocking form of each.
"""

from twinkle_client.rpc.address import Address
from twinkle_client.rpc.connection import Connection
from twinkle_client.rpc.faces import RemoteMethod, RemoteStream, remote_method, remote_stream
from twinkle_client.rpc.ids import new_id
from twinkle_client.rpc.loop import LoopThread
from twinkle_client.rpc.patience import Patience

__all__ = [
    'Address',
    'Connection',
    'LoopThread',
    'Patience',
    'RemoteMethod',
    'RemoteStream',
    'new_id',
    'remote_method',
    'remote_stream',
]
