"""The transport: a connection, the four kinds of gRPC calls, and the blocking and asyncio forms of remote methods.

Remote methods are written once, as coroutines that run on the clients' event loop (`loop`). `remote_methods`
derives the forms in which they are called.
"""

from twinkle_client.rpc.address import Address
from twinkle_client.rpc.connection import Connection, new_id
from twinkle_client.rpc.loop import LoopThread
from twinkle_client.rpc.remote_methods import RemoteMethod, RemoteStream, remote_method, remote_stream
from twinkle_client.rpc.retry import Backoff

__all__ = [
    'Address',
    'Backoff',
    'Connection',
    'LoopThread',
    'RemoteMethod',
    'RemoteStream',
    'new_id',
    'remote_method',
    'remote_stream',
]
