"""Creation of an engine that shares its passes, and if requested its frozen weights, with other processes."""

from twinkle.infra import DeviceMesh, process_count
from twinkle.model.engine.torch_pass_group import TorchPassGroup
from twinkle.model.engine.trainer_engine import TrainerEngine
from twinkle.nn import PackedCausalLM
from twinkle.parallel import shard_base, torch_mesh


def engine_on_mesh(model: PackedCausalLM, mesh: DeviceMesh | None, *, max_pass_tokens: int) -> TrainerEngine:
    """Create the engine of this process. Every process of the program must call it, after `join_ranks`.

    Args:
        model: model with equal weights in all processes; its frozen weights are divided among the `fsdp` ranks.
        mesh: result of `program_mesh`; None for one process.
        max_pass_tokens: see `TrainerEngine`.

    Raises:
        UnsupportedModel: the weights of the model cannot be shared by `fsdp` ranks.
    """
    if mesh is not None and mesh.fsdp_world_size > 1:
        shard_base(model, torch_mesh(mesh, device_type=model.device.type))
    group = TorchPassGroup() if process_count() > 1 else None
    return TrainerEngine(model, max_pass_tokens=max_pass_tokens, group=group)
