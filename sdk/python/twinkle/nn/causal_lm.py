"""Frozen Hugging Face causal language model that runs packed sequences under many adapters."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twinkle.nn.active_adapters import ActiveAdapters
from twinkle.nn.attention import SEQUENCES_ARGUMENT
from twinkle.nn.blocked_modules import divide_products
from twinkle.nn.checkpointing import checkpoint_layers
from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.four_bit import FourBitLinear, quantized_count
from twinkle.nn.fused_layers import fuse_layers, pack_layers, replace_module
from twinkle.nn.kernel_layer import KernelLayer
from twinkle.nn.lora_linear import LoraLinear
from twinkle.nn.media import MediaInputs, MediaSpan, load_pretrained
from twinkle.nn.packed_model import PackedModel
from twinkle.nn.precision import chosen_dtype, torch_device
from twinkle.nn.probe import check_configuration, check_packed, reference_of, refusing
from twinkle.nn.routers import RouterKind, hook_routers, router_kinds
from twinkle.nn.rows import pad_rows
from twinkle.nn.sequences import PackedSequences
from twinkle.nn.sharding import LoadSharding


class PackedCausalLM(PackedModel):
    """Frozen decoder-only model of transformers whose linear layers all accept adapters.

    Args:
        model: model to wrap; it is changed in place and must not be used elsewhere afterwards.
        is_checkpointed: whether the backward pass recomputes each layer's activations instead of storing them.
        sharding: division of the model's weights among ranks, which has already been applied.
    """

    def __init__(
        self, model: PreTrainedModel, *, is_checkpointed: bool = False, sharding: LoadSharding | None = None
    ) -> None:
        config, active = model.config.get_text_config(), ActiveAdapters()
        head, head_path = _head_of(model, config)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._media = MediaInputs.of(model)
        text = model if self._media is None else self._media.language_model
        routers: set[RouterKind] = set()
        for part in [text] if sharding is None else sharding.whole_parts():
            fuse_layers(part)
            routers |= router_kinds(part)
        experts = pack_layers(model, active, within=text)
        divide_products(text)
        super().__init__(
            config,
            head=head,
            head_path=head_path,
            layers=_wrap_linears(model, active, within=text),
            widths=_widths_of(text, head=head),
            active=active,
        )
        self.sharding = sharding
        self.experts = experts
        self.routing = hook_routers(text, active, kinds=routers) if experts else None
        if self._media is not None:
            self.media = self._media.spec
        self._generation_config = model.generation_config
        self._parameter_owners = _owners_of(model, names)
        quantized = quantized_count(model)
        self.is_quantized = quantized > 0
        self._parameter_count = sum(parameter.numel() for parameter in model.parameters()) + quantized
        model.requires_grad_(False)
        self._backbone = model.eval().base_model if self._media is None else text
        if is_checkpointed:
            checkpoint_layers(text, active)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: str = 'float32',
        device: str = 'cpu',
        is_checkpointed: bool = False,
        prepare: Callable[[PreTrainedModel], object] | None = None,
        sharding: LoadSharding | None = None,
    ) -> 'PackedCausalLM':
        """Load a model folder.

        Args:
            path: local folder in the Hugging Face layout; no file is downloaded and no code from it is executed.
            dtype: torch dtype of the frozen weights, by name, or 'auto'; see `twinkle.nn.chosen_dtype`. Adapters are
                always float32.
            device: torch device of the model.
            is_checkpointed: whether the backward pass recomputes each layer's activations instead of storing them.
                Recomputation takes about a third more time, and the results are bitwise the same.
            prepare: called with the loaded model to change it in place before it is wrapped, as `twinkle.patch` does.
            sharding: divides the weights among ranks. Every rank must call this method, and reads only its shards.

        Raises:
            UnsupportedModel: the architecture has layers that cannot run packed sequences, or the results of a few
                sequences differ from transformers; see `twinkle.nn.probe`.
            OSError: the folder does not contain a model.
            ValueError: torch does not know the device, or finds no GPU.
        """
        torch_device(device)
        divide = None if sharding is None else sharding.divide
        dtype = chosen_dtype(dtype, path, device=device)
        model = load_pretrained(path, dtype=getattr(torch, dtype), divide=divide)
        # Freeze the weights first. If FSDP gathered trainable weights, each pass would compute their gradients.
        model.requires_grad_(requires_grad=False)
        if prepare is not None:
            prepare(model)
        with refusing(model):
            model.to(device)
            with nullcontext() if sharding is None else sharding.whole_weights():
                reference = reference_of(model)
            packed = cls(model, is_checkpointed=is_checkpointed, sharding=sharding)
            check_configuration(packed)
            with packed.whole_weights():
                check_packed(packed, model, reference, is_bitwise=packed.device.type == 'cpu')
        return packed

    @property
    def base_parameters(self) -> dict[str, Tensor]:
        """Frozen weights by the model's parameter names, tied weights once.

        If the model is sharded, the values are the shards of this rank (`DTensor`), and `base_state` gathers them.
        Sharding replaces the parameters, so read this property again instead of keeping its result.
        """
        return {name: getattr(module, key) for name, (module, key) in self._parameter_owners.items()}

    def base_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole tensor of each frozen weight; all ranks of a sharded model must read all."""
        for name, parameter in self.base_parameters.items():
            whole = parameter if self.sharding is None else self.sharding.gathered(parameter)
            yield name, whole.detach()

    @property
    def backbone(self) -> nn.Module:
        """Frozen model without its output head. Patches may change it while no pass is running."""
        return self._backbone

    @property
    def kernel_layers(self) -> list[KernelLayer]:
        """Layers whose arithmetic an external kernel can replace, in the model's order."""
        return [module for module in self._backbone.modules() if isinstance(module, KernelLayer)]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation."""
        declared = getattr(self._generation_config, 'eos_token_id', None)
        if declared is None:
            declared = self.config.eos_token_id
        if declared is None:
            return ()
        return (declared,) if isinstance(declared, int) else tuple(declared)

    @property
    def parameter_count(self) -> int:
        """Number of scalars in the frozen model."""
        return self._parameter_count

    def _run(self, ids: Tensor, position_ids: Tensor, sequences: PackedSequences, media: Sequence[MediaSpan]) -> Tensor:
        if self._media is None:
            inputs = {'input_ids': ids[None], 'position_ids': pad_rows(position_ids, len(ids))[None]}
        else:
            inputs = self._media(ids, position_ids, media)
        output = self._backbone(**inputs, use_cache=False, **{SEQUENCES_ARGUMENT: sequences})
        return output.last_hidden_state[0]


def _head_of(model: PreTrainedModel, config: Any) -> tuple[nn.Linear, str]:
    """Return the output head and its module path."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModel(f'{type(model).__name__} has no linear output head')
    if getattr(config, 'attn_logit_softcapping', None) is not None:
        raise UnsupportedModel(
            f'{type(model).__name__} sets attn_logit_softcapping, which the packed forward path does not support'
        )
    path = next(path for path, module in model.named_modules() if module is head)
    return head, path


def _owners_of(model: nn.Module, names: Mapping[nn.Parameter, str]) -> dict[str, tuple[nn.Module, str]]:
    """Return the module of each parameter and the parameter's name in the module, in the order of `names`."""
    owners = {
        parameter: (module, key)
        for module in model.modules()
        for key, parameter in module.named_parameters(recurse=False)
    }
    return {name: owners[parameter] for parameter, name in names.items()}


def _widths_of(text: nn.Module, *, head: nn.Module) -> set[int]:
    """Return the column counts of the matrix products of a pass, including products of routers."""
    products = [module for module in text.modules() if module is not head and not isinstance(module, nn.Embedding)]
    # Weights in four bits are not parameters.
    layers = (module for module in products if isinstance(module, FourBitLinear))
    quantized = {width for layer in layers for width in (layer.in_features, layer.out_features)}
    return quantized | {
        width
        for module in products
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2
        for width in parameter.shape
    }


def _wrap_linears(model: PreTrainedModel, active: ActiveAdapters, *, within: nn.Module) -> dict[str, tuple[int, int]]:
    """Replace the linear layers below `within`, except the head, by `LoraLinear`; return their widths by path."""
    head, own = model.get_output_embeddings(), set(within.modules())
    linears = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and module in own
    }
    if not linears:
        raise UnsupportedModel(f'{type(model).__name__} has no linear layers to adapt')
    for layer, (path, linear) in enumerate(linears.items()):
        replace_module(model, path, LoraLinear(linear, path=path, layer=layer, active=active))
    return {path: (linear.in_features, linear.out_features) for path, linear in linears.items()}
