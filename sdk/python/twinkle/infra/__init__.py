"""Where a program runs: meshes of devices, groups of them, and how the program is told.

One process on one device is what works today; larger meshes can be described but not run.
"""

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.logs import get_logger
from twinkle.infra.placement import get_device_placement
from twinkle.infra.placing import DEFAULT_GROUP, place_here, remote_class, remote_function
from twinkle.infra.runtime import NotSupportedYet, Runtime, initialize, refuse_many_ranks, runtime

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
    'refuse_many_ranks',
    'remote_class',
    'remote_function',
    'runtime',
]
