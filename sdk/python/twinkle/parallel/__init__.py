"""Distribution of one model over several processes, with torch's own sharding and process groups."""

from twinkle.parallel.collectives import (
    CallsDiffer,
    all_gather,
    broadcast,
    outcome_of,
    result_or_raise,
    run_on_rank,
)
from twinkle.parallel.fsdp import FsdpSharding
from twinkle.parallel.process_group import join_alone, join_ranks, program_store
from twinkle.parallel.rank_watch import RankWatch

__all__ = [
    'CallsDiffer',
    'FsdpSharding',
    'RankWatch',
    'all_gather',
    'broadcast',
    'join_alone',
    'join_ranks',
    'outcome_of',
    'program_store',
    'result_or_raise',
    'run_on_rank',
]
