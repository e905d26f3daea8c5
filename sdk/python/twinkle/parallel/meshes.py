"""The mesh of `torch.distributed` for sharding."""

import torch
from torch.distributed import device_mesh as torch_meshes

from twinkle.infra import DeviceMesh


def torch_mesh(mesh: DeviceMesh, *, device_type: str) -> torch_meshes.DeviceMesh:
    """Return the mesh of two axes that `shard_base` expects. Every process of the program must call it.

    Args:
        mesh: mesh that `program_mesh` accepted: its ranks ascend along `dp`, then `fsdp`.
        device_type: torch device type of the model.
    """
    ranks = torch.arange(mesh.world_size).view(mesh.dp_world_size, mesh.fsdp_world_size)
    return torch_meshes.DeviceMesh(device_type, ranks, mesh_dim_names=('replicate', 'shard'))
