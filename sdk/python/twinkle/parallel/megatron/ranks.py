"""Process groups of a mesh with tensor and pipeline parallelism."""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from twinkle.infra import DeviceMesh
from twinkle.parallel.mesh_groups import axis_group, equal_group


@dataclass(frozen=True)
class MegatronRanks:
    """Groups of this rank along the axes of a mesh. Every rank of the program must create an instance."""

    tensor: dist.ProcessGroup
    """Ranks that divide each layer."""
    pipeline: dist.ProcessGroup
    """Ranks that hold the pipeline stages, including this rank, in the order of the stages."""
    data: dist.ProcessGroup
    """Ranks that have the same weights and run different passes."""
    model: dist.ProcessGroup
    """Ranks that together have one copy of the model, and run passes together."""
    alone: dist.ProcessGroup
    """This rank."""
    is_sequence_parallel: bool
    """Whether `tensor` ranks also divide the activations between layers by rows."""
    is_expert_parallel: bool
    """Whether the mesh has an `ep_size` above 1, which only mixtures of experts accept."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> 'MegatronRanks':
        """Create the groups; `torch.distributed` must be initialized with one rank per rank of the mesh."""
        return cls(
            tensor=axis_group(mesh, 'tp'),
            pipeline=axis_group(mesh, 'pp'),
            data=axis_group(mesh, 'dp'),
            model=equal_group(mesh, 'dp'),
            alone=axis_group(mesh, 'cp'),
            # One rank has nothing to divide.
            is_sequence_parallel=mesh.sequence_parallel and mesh.tp_world_size > 1,
            is_expert_parallel=mesh.axis_size('ep') > 1,
        )

    @property
    def collection(self) -> ProcessGroupCollection:
        """The groups under Megatron-core's names."""
        return ProcessGroupCollection(tp=self.tensor, pp=self.pipeline, cp=self.alone)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers."""
        return self.pipeline.rank() == self.pipeline.size() - 1
