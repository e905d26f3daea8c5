"""Runtime configuration: device meshes, device groups, and `initialize`.

Programs run in one process, in several processes that torchrun starts, or in one process with workers on Ray.
"""

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.errors import NotSupportedYet
from twinkle.infra.launcher import is_first_rank, process_count, program_mesh
from twinkle.infra.logs import get_logger
from twinkle.infra.placement_report import get_device_placement
from twinkle.infra.remote import DEFAULT_GROUP, place_here, remote_class, remote_function
from twinkle.infra.runtime import Runtime, initialize, refuse_many_ranks, runtime

__all__ = [
    'DEFAULT_GROUP',
    'DeviceGroup',
    'DeviceMesh',
    'NotSupportedYet',
    'Runtime',
    'get_device_placement',
    'get_logger',
    'initialize',
    'is_first_rank',
    'place_here',
    'process_count',
    'program_mesh',
    'refuse_many_ranks',
    'remote_class',
    'remote_function',
    'runtime',
]
