"""Futures: accepted durably, carried out in order, and told to whoever waits.

`verbs` is what the APIs use; `runner` carries out; `execute`, `create_adapter` and `delete_adapter` are
what it carries out; `expire` forgets what is old.
"""

from services.gateway.application.futures.bulletin import Bulletin
from services.gateway.application.futures.create_adapter import CreateAdapter
from services.gateway.application.futures.delete_adapter import DeleteAdapter
from services.gateway.application.futures.execute import ExecuteOperation
from services.gateway.application.futures.expire import ExpireFutures
from services.gateway.application.futures.follow_peers import FollowPeers
from services.gateway.application.futures.follow_topic import FollowTopic
from services.gateway.application.futures.persistence import Persistence
from services.gateway.application.futures.runner import Runner, RunnerLimits
from services.gateway.application.futures.sample import SamplePrompt
from services.gateway.application.futures.verbs import FutureVerbs
from services.gateway.application.futures.world import World

__all__ = [
    'Bulletin',
    'CreateAdapter',
    'DeleteAdapter',
    'ExecuteOperation',
    'ExpireFutures',
    'FollowPeers',
    'FollowTopic',
    'FutureVerbs',
    'Persistence',
    'Runner',
    'RunnerLimits',
    'SamplePrompt',
    'World',
]
