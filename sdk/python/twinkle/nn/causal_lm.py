"""Frozen Hugging Face causal language model that runs packed sequences under many adapters.

Legend: T rows of the pack, R any selection of rows, K candidates of a row, D hidden size, V vocabulary.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twinkle.data_format import MediaSpec
from twinkle.nn.active_adapters import ActiveAdapters, LayerSpan, Pass
from twinkle.nn.attention import SEQUENCES_ARGUMENT
from twinkle.nn.checkpointing import checkpoint_layers
from twinkle.nn.errors import PackError, UnsupportedModel
from twinkle.nn.fused_layers import fuse_layers, pack_layers, replace_module
from twinkle.nn.head import HeadOutputs, run_head
from twinkle.nn.head_weights import HeadAdapter, HeadWeights
from twinkle.nn.kernel_layer import KernelLayer
from twinkle.nn.kv_cache import CacheSize, KVCache
from twinkle.nn.lora_linear import LoraLinear
from twinkle.nn.media import MediaInputs, MediaSpan, load_pretrained
from twinkle.nn.probe import check_configuration, check_packed, reference_of, refusing
from twinkle.nn.rows import pad_rows, padded_row_count
from twinkle.nn.sharding import BaseSharding
from twinkle.nn.spans import AdapterSpan, SequenceSpan, check_spans
from twinkle.nn.targets import TargetLayers


class PackedCausalLM:
    """Frozen decoder-only model of transformers whose linear layers all accept adapters.

    Concurrency: one forward pass at a time; call it from one thread.

    Args:
        model: model to wrap; it is changed in place and must not be used elsewhere afterwards.
        is_checkpointed: whether the backward pass recomputes each layer's activations instead of storing them.
    """

    def __init__(self, model: PreTrainedModel, *, is_checkpointed: bool = False) -> None:
        self.config: Any = model.config.get_text_config()
        self._generation_config = model.generation_config
        self._active = ActiveAdapters()
        self.sharding: BaseSharding | None = None
        """Division of the frozen weights among several ranks; None if this process has all weights."""
        self.head_layer, self.head_path = _head_of(model, self.config)
        """Output head and its module path."""
        self._softcap: float | None = getattr(self.config, 'final_logit_softcapping', None)
        self._logit_scale = _logit_scale_of(self.config)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._media = MediaInputs.of(model)
        text = model if self._media is None else self._media.language_model
        fuse_layers(text)
        pack_layers(text)
        self.layers = _wrap_linears(model, self._active, within=text)
        """Module path to `(in_features, out_features)`, in the model's order, without the output head."""
        self.targets = TargetLayers(self.layers, head=self.head_path, shape=self._head.shape)
        """`layers` plus the output head as the last entry: every layer that accepts an adapter."""
        self._parameter_owners = _owners_of(model, names)
        self._widths = _widths_of(text, head=model.get_output_embeddings())
        self._parameter_count = sum(parameter.numel() for parameter in model.parameters())
        model.requires_grad_(False)
        self._backbone = model.eval().base_model if self._media is None else text
        if is_checkpointed:
            checkpoint_layers(text, self._active)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: str = 'float32',
        device: str = 'cpu',
        is_checkpointed: bool = False,
        prepare: Callable[[PreTrainedModel], object] | None = None,
    ) -> 'PackedCausalLM':
        """Load a model folder.

        Args:
            path: local folder in the Hugging Face layout; no file is downloaded and no code from it is executed.
            dtype: torch dtype of the frozen weights, by name. Adapters are always float32.
            device: torch device of the model.
            is_checkpointed: whether the backward pass recomputes each layer's activations instead of storing them.
                It costs about a third more time and the results are bitwise the same.
            prepare: called with the loaded model to change it in place before it is wrapped, as `twinkle.patch` does.

        Raises:
            UnsupportedModel: the architecture has layers that cannot run packed sequences, or the results of a few
                sequences differ from those of transformers; see `twinkle.nn.probe`.
            OSError: the folder does not contain a model.
        """
        model = load_pretrained(path, dtype=getattr(torch, dtype))
        if prepare is not None:
            prepare(model)
        with refusing(model):
            reference = reference_of(model.to(device))
            packed = cls(model, is_checkpointed=is_checkpointed)
            check_configuration(packed)
            check_packed(packed, model, reference, is_bitwise=packed.device.type == 'cpu')
        return packed

    @property
    def base_parameters(self) -> dict[str, Tensor]:
        """Frozen weights by the model's parameter names, tied ones once.

        If the model is sharded, the values are the shards of this rank (`DTensor`), and `base_state` gathers them.
        Sharding replaces the parameters, so read this property again instead of keeping its result.
        """
        return {name: getattr(module, key) for name, (module, key) in self._parameter_owners.items()}

    def base_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole tensor of each frozen weight; all ranks of a sharded model must read all."""
        for name, parameter in self.base_parameters.items():
            whole = parameter if self.sharding is None else self.sharding.gathered(parameter)
            yield name, whole.detach()

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which embedding and head are whole, for passes outside of `BaseSharding.running_pass`."""
        return nullcontext() if self.sharding is None else self.sharding.whole_weights()

    @property
    def _head(self) -> HeadWeights:
        return HeadWeights(self.head_layer.weight, self.head_layer.bias, self._softcap)

    @property
    def backbone(self) -> nn.Module:
        """Frozen model without its output head. Patches may change it while no pass is running."""
        return self._backbone

    @property
    def kernel_layers(self) -> list[KernelLayer]:
        """Layers whose arithmetic an external kernel can replace, in the model's order."""
        return [module for module in self._backbone.modules() if isinstance(module, KernelLayer)]

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Maximum sequence length, in tokens."""
        return self.config.max_position_embeddings

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
    def media(self) -> MediaSpec | None:
        """Specification of the images, videos or audio that the model reads; None for a text model."""
        return None if self._media is None else self._media.spec

    @property
    def parameter_count(self) -> int:
        """Number of scalars in the frozen model."""
        return self._parameter_count

    @cached_property
    def cache_size(self) -> CacheSize:
        """Memory of the `KVCache` of one sequence, as measured with a pass of one token."""
        cache, token = KVCache(), torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            self.hidden(token, token, sequences=[SequenceSpan(0, 1, cache)])
        return cache.size

    @property
    def dtype_name(self) -> str:
        """Name of the torch dtype of the frozen weights."""
        return str(self._head.weight_VD.dtype).removeprefix('torch.')

    @property
    def device(self) -> torch.device:
        """Device of the model; inputs must be on it."""
        return self._head.weight_VD.device

    def hidden(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        *,
        sequences: Sequence[SequenceSpan],
        adapters: Sequence[AdapterSpan] = (),
        media: Sequence[MediaSpan] = (),
    ) -> Tensor:
        """Run the pack through all layers except the head.

        Args:
            input_ids_T: int64 [T].
            position_ids_T: int64 [T], the position of each token within its sequence; for a model with a vision or
                audio tower also [3, T], the positions on the time, height and width axes.
            sequences: spans that cover all rows in order.
            adapters: disjoint spans in order; rows outside them use the base model. Gradients are recorded under
                torch's grad mode for the adapters whose weights require them.
            media: images, videos and clips whose tokens are among the rows.

        Returns:
            float [T, D], after the final norm.

        Raises:
            PackError: the spans do not fit the rows, or media was given to a text model.
        """
        row_count = input_ids_T.shape[0]
        if row_count == 0 or position_ids_T.shape[-1:] != input_ids_T.shape:
            raise PackError('input_ids and position_ids must have the same length and at least one token')
        if self._media is None and (media or position_ids_T.dim() != 1):
            raise PackError('this model reads only text; leave media out and give one position per token')
        check_spans(row_count, sequences, adapters)
        padded_count = padded_row_count(row_count, self._widths)
        ids = pad_rows(input_ids_T, padded_count)
        inputs = self._inputs(ids, position_ids_T, media)
        with self._active.activate(Pass(adapters, row_count=padded_count)):
            output = self._backbone(**inputs, use_cache=False, **{SEQUENCES_ARGUMENT: sequences})
        return output.last_hidden_state[0, :row_count]

    def _inputs(self, ids: Tensor, position_ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Return the backbone's keyword arguments for padded ids."""
        if self._media is None:
            return {'input_ids': ids[None], 'position_ids': pad_rows(position_ids, len(ids))[None]}
        return self._media(ids, position_ids, media)

    def logits(self, hidden_RD: Tensor, *, adapters: Sequence[AdapterSpan] = ()) -> Tensor:
        """Return float32 [R, V], the logits of some rows. All of them are materialized, so pass few rows.

        Args:
            hidden_RD: rows of the result of `hidden`.
            adapters: spans over these rows; only adapters with an update at the head have an effect.
        """
        used = [span for span in adapters if span.adapter is not None]
        updates = [span.adapter.update_of(self.head_path) for span in used]
        spans = [
            LayerSpan(span.begin_row, span.end_row, update, None)
            for span, update in zip(used, updates, strict=True)
            if update is not None
        ]
        return self._head.logits(self._scaled(hidden_RD), spans)

    def head_outputs(
        self,
        hidden_RD: Tensor,
        labels_R: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        is_entropy_needed: bool = False,
        candidate_ids_RK: Tensor | None = None,
        adapter: HeadAdapter | None = None,
    ) -> HeadOutputs:
        """Compute the values that losses need from each row's distribution, block by block to bound memory.

        Only the requested values are computed. A row's results do not depend on the other rows.

        Args:
            hidden_RD: rows of the result of `hidden`.
            labels_R: int64 [R] in [0, vocab_size).
            temperature: positive divisor of the logits, one for all rows or float32 [R].
            is_entropy_needed: whether to compute entropies.
            candidate_ids_RK: int64 [R, K], token ids whose log-probabilities are computed in addition to the label's.
            adapter: update of the head for all these rows, if their adapter has one.
        """
        return run_head(
            self._scaled(hidden_RD),
            labels_R,
            replace(self._head, adapter=adapter),
            temperature=temperature,
            is_entropy_needed=is_entropy_needed,
            candidate_ids_RK=candidate_ids_RK,
        )

    def label_logprobs(self, hidden_RD: Tensor, labels_R: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Return float32 [R], the natural log-probability of each row's label."""
        return self.head_outputs(hidden_RD, labels_R, temperature=temperature).logps_R

    def _scaled(self, hidden_RD: Tensor) -> Tensor:
        """Return hidden states for which the head computes the model's logits, including their scale."""
        return hidden_RD if self._logit_scale == 1.0 else hidden_RD * self._logit_scale


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


def _logit_scale_of(config: Any) -> float:
    """Return the factor by which a model multiplies its logits."""
    if (scale := getattr(config, 'logit_scale', None)) is not None:
        return scale
    scaling = getattr(config, 'logits_scaling', None)
    if scaling is None:
        return 1.0
    # Granite divides by the field, and HyperCLOVA X multiplies by it.
    return scaling if config.model_type == 'hyperclovax' else 1.0 / scaling


def _widths_of(text: nn.Module, *, head: nn.Module) -> set[int]:
    """Return the column counts of the matrix products of a pass, including those of routers."""
    products = (module for module in text.modules() if module is not head and not isinstance(module, nn.Embedding))
    return {
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
