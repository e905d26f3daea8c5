"""Loading of an engine that shares its passes, and if requested its frozen weights, with other processes."""

import os
from typing import Any

import torch
from torch.distributed import device_mesh as torch_meshes

from twinkle.infra import DeviceMesh, process_count
from twinkle.model.engine.torch_pass_group import TorchPassGroup
from twinkle.model.engine.trainer_engine import TrainerEngine
from twinkle.nn import PackedCausalLM
from twinkle.parallel import join_ranks, shard_base


def load_on_mesh(
    folder: str | os.PathLike[str],
    mesh: DeviceMesh | None,
    *,
    device: str,
    max_pass_tokens: int,
    **load_options: Any,
) -> TrainerEngine:
    """Load a model and create the engine of this process. Every process of the program must call it.

    Args:
        folder: folder of the model, with equal weights in all processes.
        mesh: result of `program_mesh`; its `fsdp` ranks divide the frozen weights.
        device: torch device. Several processes of one machine need 'cuda' without a number, and use one GPU each.
        max_pass_tokens: see `TrainerEngine`.
        load_options: other arguments of `PackedCausalLM.load`.

    Raises:
        ValueError: the device does not fit the processes.
        UnsupportedModel: the model is not supported, or its weights cannot be shared by `fsdp` ranks.
    """
    if process_count() > 1 and torch.device(device).index is not None:
        raise ValueError(
            f'device {device!r} has a number, but {process_count()} processes share the model; leave the number out, '
            'so that each process uses another GPU'
        )
    join_ranks(torch.device(device).type)
    model = PackedCausalLM.load(folder, device=device, **load_options)
    if mesh is not None and mesh.fsdp_world_size > 1:
        # The ranks of the program's mesh ascend along `dp`, then `fsdp`.
        ranks = torch.arange(mesh.world_size).view(mesh.dp_world_size, mesh.fsdp_world_size)
        axes = ('replicate', 'shard')
        shard_base(model, torch_meshes.DeviceMesh(model.device.type, ranks, mesh_dim_names=axes))
    group = TorchPassGroup() if mesh is not None and mesh.world_size > 1 else None
    return TrainerEngine(model, max_pass_tokens=max_pass_tokens, group=group)
