"""A frozen Hugging Face causal language model that runs packs of sequences under many adapters.

Legend: T rows of the pack, R rows of any choice of them, D hidden size, V vocabulary.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twinkle.data_format import MediaSpec
from twinkle.nn.active_adapters import ActiveAdapters, LayerSpan, Pass
from twinkle.nn.attention import SEQUENCES_ARGUMENT
from twinkle.nn.checkpointing import checkpoint_layers
from twinkle.nn.errors import PackError, UnsupportedModel
from twinkle.nn.fused_layers import fuse_layers, replace_module
from twinkle.nn.head import HeadOutputs, run_head
from twinkle.nn.head_weights import HeadAdapter, HeadWeights
from twinkle.nn.kernel_seam import KernelSeam
from twinkle.nn.lora_linear import LoraLinear
from twinkle.nn.media import MediaInputs, MediaSpan, load_pretrained
from twinkle.nn.rows import pad_rows, padded_row_count
from twinkle.nn.spans import AdapterSpan, SequenceSpan, check_spans
from twinkle.nn.targets import TargetLayers


class PackedCausalLM:
    """Any decoder-only model of transformers, frozen, with every linear layer adaptable.

    Concurrency: one forward pass at a time; drive it from one thread.

    Args:
        model: taken over and changed in place.
        is_checkpointed: whether the backward pass runs each layer again instead of keeping its activations.
    """

    def __init__(self, model: PreTrainedModel, *, is_checkpointed: bool = False) -> None:
        self.config: Any = model.config.get_text_config()
        self._generation_config = model.generation_config
        self._active = ActiveAdapters()
        self._head, self.head_path = _head_of(model, self.config)
        self.base_parameters = dict(model.named_parameters())
        """The frozen weights by the model's own names, tied ones once."""
        self._media = MediaInputs.of(model)
        text = model if self._media is None else self._media.language_model
        fuse_layers(text)
        self.layers = _wrap_linears(model, self._active, within=text)
        """Module path to `(in_features, out_features)`, in the model's order, without the output head."""
        self.targets = TargetLayers(self.layers, head=self.head_path, shape=self._head.shape)
        """The same with the head as the last one: all that an adapter may be of."""
        self._widths = {width for widths in self.layers.values() for width in widths}
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
            path: a local folder in the Hugging Face layout; nothing is fetched and no code in it is run.
            dtype: of the frozen weights, by torch's name. Adapters are always float32.
            device: where it runs.
            is_checkpointed: whether the backward pass runs each layer again instead of keeping its activations.
                Takes about a third more time and changes no bit.
            prepare: changes the model in place before anything is built on it, such as `twinkle.patch` does.

        Raises:
            UnsupportedModel: the architecture cannot be run in packs.
            OSError: the folder is no model.
        """
        model = load_pretrained(path, dtype=getattr(torch, dtype))
        if prepare is not None:
            prepare(model)
        return cls(model.to(device), is_checkpointed=is_checkpointed)

    @property
    def backbone(self) -> nn.Module:
        """The frozen model without its output head, for whoever patches it; no pass may run meanwhile."""
        return self._backbone

    @property
    def seams(self) -> list[KernelSeam]:
        """Layers whose arithmetic another kernel may take over, in the model's order."""
        return [module for module in self._backbone.modules() if isinstance(module, KernelSeam)]

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence, in tokens."""
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
        """How images, videos or audio are read; None where only text is."""
        return None if self._media is None else self._media.spec

    @property
    def parameter_count(self) -> int:
        """Number of scalars in the frozen model."""
        return self._parameter_count

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in a `KVCache`."""
        heads = getattr(self.config, 'num_key_value_heads', None) or self.config.num_attention_heads
        head_dim = getattr(self.config, 'head_dim', None) or self.config.hidden_size // self.config.num_attention_heads
        return 2 * self.config.num_hidden_layers * heads * head_dim * self._head.weight_VD.element_size()

    @property
    def dtype_name(self) -> str:
        """Of the frozen weights, by torch's name."""
        return str(self._head.weight_VD.dtype).removeprefix('torch.')

    @property
    def device(self) -> torch.device:
        """Where the model runs; inputs must be there."""
        return self._head.weight_VD.device

    def hidden(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        *,
        sequences: Sequence[SequenceSpan],
        adapters: Sequence[AdapterSpan] = (),
        media: Sequence[MediaSpan] = (),
        is_training: bool = False,
    ) -> Tensor:
        """Run the pack through all layers but the head.

        Args:
            input_ids_T: int64 [T].
            position_ids_T: int64 [T], the position of each token within its sequence; or, for a model that reads
                images, [3, T]: its places in time, height and width.
            sequences: cover all rows in order.
            adapters: in order, disjoint; rows in none use the base model.
            media: images and videos among the rows, each in the place of its tokens.
            is_training: draw dropout, each adapter from its own generator. Whether gradients are
                recorded is torch's grad mode, and reaches adapters whose weights require them.

        Returns:
            float [T, D], after the final norm.

        Raises:
            PackError: the spans do not fit the rows, or the model reads no images.
        """
        row_count = input_ids_T.shape[0]
        if row_count == 0 or position_ids_T.shape[-1:] != input_ids_T.shape:
            raise PackError('input_ids and position_ids must be equally long and not empty')
        if self._media is None and (media or position_ids_T.dim() != 1):
            raise PackError('the model reads text alone; leave media out, and give one position a token')
        check_spans(row_count, sequences, adapters)
        padded_count = padded_row_count(row_count, self._widths)
        ids = pad_rows(input_ids_T, padded_count)
        inputs = self._inputs(ids, position_ids_T, media)
        with self._active.during(Pass.begin(adapters, row_count=padded_count, is_training=is_training)):
            output = self._backbone(**inputs, use_cache=False, **{SEQUENCES_ARGUMENT: sequences})
        return output.last_hidden_state[0, :row_count]

    def _inputs(self, ids: Tensor, position_ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Return what the backbone takes for padded ids."""
        if self._media is None:
            return {'input_ids': ids[None], 'position_ids': pad_rows(position_ids, len(ids))[None]}
        return self._media(ids, position_ids, media)

    def logits(self, hidden_RD: Tensor, *, adapters: Sequence[AdapterSpan] = ()) -> Tensor:
        """Return float32 [R, V] for rows of `hidden`'s result. For few rows: all are held at once.

        Args:
            hidden_RD: the rows.
            adapters: of these rows; those that change the head do.
        """
        used = [span for span in adapters if span.adapter is not None]
        updates = [span.adapter.update_of(self.head_path) for span in used]
        spans = [
            LayerSpan(span.begin_row, span.end_row, update, None)
            for span, update in zip(used, updates, strict=True)
            if update is not None
        ]
        return self._head.logits(hidden_RD, spans)

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
        """Return what losses ask of each row's distribution, in blocks of rows that bound memory.

        Only what is asked for is computed. A row's results do not depend on the other rows.

        Args:
            hidden_RD: rows of `hidden`'s result.
            labels_R: int64 [R] in [0, vocab_size).
            temperature: divides the logits; positive. For all rows, or float32 [R], one for each.
            is_entropy_needed: whether entropies are computed.
            candidate_ids_RK: int64 [R, K], ids whose log-probabilities are computed beside the label's.
            adapter: what the adapter of all these rows does at the head.
        """
        return run_head(
            hidden_RD,
            labels_R,
            replace(self._head, adapter=adapter),
            temperature=temperature,
            is_entropy_needed=is_entropy_needed,
            candidate_ids_RK=candidate_ids_RK,
        )

    def label_logprobs(self, hidden_RD: Tensor, labels_R: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Return float32 [R], the natural log-probability of each row's label: `head_outputs`' thinnest case."""
        return self.head_outputs(hidden_RD, labels_R, temperature=temperature).logps_R


def _head_of(model: PreTrainedModel, config: Any) -> tuple[HeadWeights, str]:
    """Return the output head and its path."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModel(f'{type(model).__name__} has no linear output head')
    for name in ('logit_scale', 'attn_logit_softcapping'):
        if getattr(config, name, None) is not None:
            raise UnsupportedModel(f'{type(model).__name__} sets {name}, which the packed path does not compute')
    path = next(path for path, module in model.named_modules() if module is head)
    return HeadWeights(head.weight, head.bias, softcap=getattr(config, 'final_logit_softcapping', None)), path


def _wrap_linears(model: PreTrainedModel, active: ActiveAdapters, *, within: nn.Module) -> dict[str, tuple[int, int]]:
    """Make the linear layers of a part of the model adaptable, all but the head."""
    head, own = model.get_output_embeddings(), set(within.modules())
    linears = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and module in own
    }
    if not linears:
        raise UnsupportedModel(f'{type(model).__name__} has no linear layers that could be adapted')
    for layer, (path, linear) in enumerate(linears.items()):
        replace_module(model, path, LoraLinear(linear, path=path, layer=layer, active=active))
    return {path: (linear.in_features, linear.out_features) for path, linear in linears.items()}
