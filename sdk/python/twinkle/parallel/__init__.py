"""Distribution of one model over several processes, with torch's own sharding and process groups.

`twinkle.parallel.megatron` uses Megatron-core and is not imported here.
"""

from twinkle.parallel.collectives import (
    CallsDiffer,
    all_gather,
    broadcast,
    outcome_of,
    result_or_raise,
    run_on_rank,
)
from twinkle.parallel.fsdp import FsdpSharding
from twinkle.parallel.mesh_groups import axis_group, equal_group
from twinkle.parallel.process_group import join_alone, join_ranks, program_store
from twinkle.parallel.rank_watch import RankWatch
from twinkle.parallel.ulysses import check_divisible, divide_rows

__all__ = [
    'CallsDiffer',
    'FsdpSharding',
    'RankWatch',
    'all_gather',
    'axis_group',
    'broadcast',
    'check_divisible',
    'divide_rows',
    'equal_group',
    'join_alone',
    'join_ranks',
    'outcome_of',
    'program_store',
    'result_or_raise',
    'run_on_rank',
]
