"""The trainer of one process and one device."""

from pathlib import Path
from typing import Any

import torch

from twinkle.hub import resolve_model
from twinkle.infra import DeviceMesh, NotSupportedYet, refuse_many_ranks, remote_class, runtime
from twinkle.model.base import TwinkleModel
from twinkle.model.engine import TrainerEngine
from twinkle.model.errors import InvalidArgument
from twinkle.model.verbs import ConfiguringVerbs, SavingVerbs, SendingVerbs, SteppingVerbs, TrainingVerbs
from twinkle.nn import PackedCausalLM

_DTYPES = {'no': 'float32', 'bf16': 'bfloat16'}


@remote_class()
class TransformersModel(ConfiguringVerbs, TrainingVerbs, SteppingVerbs, SavingVerbs, SendingVerbs, TwinkleModel):
    """Any causal language model of transformers, with adapters in training on one device.

    Args:
        model_id: a hub id or a folder.
        device_mesh: of one device; unset means the same.
        mixed_precision: 'no' holds the frozen weights in float32, 'bf16' in bfloat16; adapters are float32.
        device: 'cpu', 'cuda' and so on; unset: 'cuda' where there is one.
        activation_checkpointing: run each layer again in the backward pass instead of keeping its
            activations: less memory, more time, the same bits.
        max_pass_tokens: rows that run at once; larger batches run in parts.
        unsupported: what other releases take; refused by name.

    Raises:
        NotSupportedYet: several devices, or an option of `unsupported`.
        ModelNotFound: the id resolves to nothing.
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
        folder = resolve_model(model_id)
        model = PackedCausalLM.load(
            folder,
            dtype=_DTYPES[mixed_precision],
            device=device or ('cuda' if torch.cuda.is_available() else 'cpu'),
            is_checkpointed=activation_checkpointing,
        )
        engine = TrainerEngine(model, max_pass_tokens=max_pass_tokens)
        super().__init__(engine, model_id=model_id, folder=Path(folder))
