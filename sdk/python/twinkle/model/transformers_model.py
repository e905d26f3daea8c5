"""Trainer of one process and one device."""

from pathlib import Path
from typing import Any

import torch

from twinkle.hub import resolve_model
from twinkle.infra import DeviceMesh, NotSupportedYet, refuse_launched_ranks, refuse_many_ranks, remote_class, runtime
from twinkle.model.base import TwinkleModel
from twinkle.model.engine import TrainerEngine
from twinkle.model.errors import InvalidArgument
from twinkle.model.verbs import ConfiguringVerbs, SavingVerbs, SendingVerbs, SteppingVerbs, TrainingVerbs
from twinkle.nn import PackedCausalLM

_DTYPES = {'no': 'float32', 'bf16': 'bfloat16'}


@remote_class()
class TransformersModel(ConfiguringVerbs, TrainingVerbs, SteppingVerbs, SavingVerbs, SendingVerbs, TwinkleModel):
    """Causal language model of transformers with adapters in training on one device.

    Args:
        model_id: hub id or folder.
        device_mesh: mesh of one device, or None.
        mixed_precision: 'no' loads the frozen weights in float32, 'bf16' in bfloat16; adapters are float32.
        device: torch device; None uses 'cuda' if it is available, else 'cpu'.
        activation_checkpointing: whether to recompute activations in the backward pass, which needs less memory and
            more time and gives bitwise the same results.
        max_pass_tokens: maximum number of rows per pass; larger batches run in parts.
        unsupported: options of other releases, which are refused by name.

    Raises:
        NotSupportedYet: several devices, or an option in `unsupported`.
        ModelNotFound: the id does not resolve to a model.
    """

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
        refuse_many_ranks(device_mesh or runtime().device_mesh)
        refuse_launched_ranks()
        folder = resolve_model(model_id)
        model = PackedCausalLM.load(
            folder,
            dtype=_DTYPES[mixed_precision],
            device=device or ('cuda' if torch.cuda.is_available() else 'cpu'),
            is_checkpointed=activation_checkpointing,
        )
        engine = TrainerEngine(model, max_pass_tokens=max_pass_tokens)
        super().__init__(engine, model_id=model_id, folder=Path(folder))
