"""Trainer of one process, or of several processes that torchrun starts."""

from pathlib import Path
from typing import Any

import torch

from twinkle.hub import resolve_model
from twinkle.infra import DeviceMesh, NotSupportedYet, program_mesh, remote_class, runtime
from twinkle.model.base import TwinkleModel
from twinkle.model.engine.mesh_engine import EngineOptions, load_on_mesh
from twinkle.model.errors import InvalidArgument
from twinkle.model.verbs import ConfiguringVerbs, SavingVerbs, SendingVerbs, SteppingVerbs, TrainingVerbs
from twinkle.nn.four_bit import NF4

_DTYPES = {'no': 'float32', 'bf16': 'bfloat16', NF4: 'bfloat16'}
"""Dtype of the frozen weights, by the value of `mixed_precision`."""


@remote_class(execute='all', is_joined=True)
class TransformersModel(ConfiguringVerbs, TrainingVerbs, SteppingVerbs, SavingVerbs, SendingVerbs, TwinkleModel):
    """Causal language model of transformers with adapters in training.

    With `remote_group`, the trainer runs in the workers of the group, and its methods receive whole batches.

    In a program of several processes, every process makes the same calls and passes its share of each batch. All
    processes train on the whole batch. On CPUs, losses, metrics and adapters are bitwise the same as in one process
    with all shares, except that `tp` and `ulysses` ranks, and `fsdp` ranks in full-parameter training, change the
    rounding. For custom losses see `forward_backward_custom`. Each process receives the loss and the metrics of the
    whole batch, and the outputs of the examples that it passed.

    Args:
        model_id: hub id or folder.
        device_mesh: mesh with one rank per process. `dp` ranks share the passes of a batch; `fsdp` ranks also share
            one copy of the frozen weights. `ulysses` ranks divide the rows of each pass. `tp` ranks divide each layer
            and `pp` ranks the layers, as in `MegatronModel`. None: the mesh of `initialize`, or `dp` over all
            processes.
        mixed_precision: 'no' loads the frozen weights in float32, 'bf16' in bfloat16, and 'nf4' in four bits where
            layers are linear, otherwise in bfloat16 (QLoRA; extra 'nf4'). Adapters are float32.
        device: torch device; None uses 'cuda' if it is available, else 'cpu'. Processes of one
            machine use different GPUs if there are enough.
        activation_checkpointing: whether to recompute activations in the backward pass, which needs less memory and
            more time and gives bitwise the same results.
        max_pass_tokens: maximum number of rows per pass; larger batches run in parts. A part that cannot be divided,
            such as one long example, may exceed it.
        unsupported: options of other releases; the error names the first such option.

    Raises:
        NotSupportedYet: an axis with several ranks is not supported, or an option is in `unsupported`.
        InvalidArgument: `mixed_precision` is unknown.
        ValueError: the mesh does not have one rank per process, several processes are given a device with a number, or
            'nf4' is combined with `fsdp` ranks.
        UnsupportedModel: the model is not supported, or its weights or rows cannot be divided as the mesh describes; or
            'nf4' is combined with Megatron-core, or bitsandbytes is not installed.
        ImportError: the mesh has `tp` or `pp` ranks, and the extra 'megatron' is not installed.
        HubError: the id does not resolve to a model, or the model cannot be downloaded.
    """

    _is_megatron = False
    """Whether Megatron-core runs the layers on every mesh."""

    def __init__(
        self,
        model_id: str,
        *,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: str = 'no',
        device: str | None = None,
        activation_checkpointing: bool = False,
        max_pass_tokens: int = 1024,
        **unsupported: Any,
    ) -> None:
        if unsupported:
            raise NotSupportedYet(f'{sorted(unsupported)} are not supported yet; leave them out')
        if mixed_precision not in _DTYPES:
            raise InvalidArgument(f'mixed_precision must be one of {sorted(_DTYPES)}, got {mixed_precision!r}')
        mesh = program_mesh(device_mesh or runtime().device_mesh)
        folder = resolve_model(model_id)
        options = EngineOptions(
            device=device or ('cuda' if torch.cuda.is_available() else 'cpu'),
            max_pass_tokens=max_pass_tokens,
            is_megatron=self._is_megatron,
            quantization=NF4 if mixed_precision == NF4 else None,
        )
        dtype = _DTYPES[mixed_precision]
        engine = load_on_mesh(folder, mesh, options, dtype=dtype, is_checkpointed=activation_checkpointing)
        super().__init__(engine, model_id=model_id, folder=Path(folder), mesh=mesh)
