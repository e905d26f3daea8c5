"""Runtime configuration: device meshes, device groups, and `initialize`.

Programs run in one process on one device. Larger meshes can be described, but components refuse to run on them.
"""

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.logs import get_logger
from twinkle.infra.placement_report import get_device_placement
from twinkle.infra.remote import DEFAULT_GROUP, place_here, remote_class, remote_function
from twinkle.infra.runtime import (
    NotSupportedYet,
    Runtime,
    initialize,
    refuse_launched_ranks,
    refuse_many_ranks,
    runtime,
)

__all__ = [
    'DEFAULT_GROUP',
    'DeviceGroup',
    'DeviceMesh',
    'NotSupportedYet',
    'Runtime',
    'get_device_placement',
    'get_logger',
    'initialize',
    'place_here',
    'refuse_launched_ranks',
    'refuse_many_ranks',
    'remote_class',
    'remote_function',
    'runtime',
]
