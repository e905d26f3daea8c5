"""Frozen causal language model whose layers Megatron-core runs on several ranks.

Legend: T rows of the pack, S rows of this rank (all rows without sequence parallelism), D hidden size, H head size.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from twinkle.nn import KernelLayer, MediaSpan, PackedModel, UnsupportedModel, chosen_dtype
from twinkle.nn.active_adapters import ActiveAdapters
from twinkle.nn.rows import pad_rows
from twinkle.nn.sequences import PackedSequences
from twinkle.parallel.collectives import broadcast
from twinkle.parallel.megatron.checkpointing import checkpoint_block
from twinkle.parallel.megatron.configuration import check_supported, rope_frequencies
from twinkle.parallel.megatron.layers import Pack
from twinkle.parallel.megatron.layout import (
    EMBEDDING,
    HEAD,
    expert_shapes,
    is_known_weight,
    linear_shapes,
    padded_vocabulary,
    stage_layers,
)
from twinkle.parallel.megatron.pipeline import FromPreviousStage, ToAllStages
from twinkle.parallel.megatron.ranks import MegatronRanks
from twinkle.parallel.megatron.sharding import MegatronSharding, ShardedHead
from twinkle.parallel.megatron.stage import StageBuilder
from twinkle.parallel.megatron.weights import FolderWeights
from twinkle.parallel.rows import gathered_rows, own_rows


class MegatronCausalLM(PackedModel):
    """Frozen decoder-only model with tensor, sequence and pipeline parallelism. Use `load` to create it.

    Every rank has complete adapters, under the names that they have in `PackedCausalLM`. Every rank of a pass computes
    equal results. Pipeline stages run one after the other: they divide memory, but not time.

    Args:
        config: configuration of the model in transformers.
        builder: builder of the layers of this rank.
        ranks: groups of this rank.
        is_checkpointed: whether the backward pass recomputes each layer's activations instead of storing them.
    """

    def __init__(
        self, config: PreTrainedConfig, builder: StageBuilder, ranks: MegatronRanks, *, is_checkpointed: bool = False
    ) -> None:
        self._ranks = ranks
        self._block = builder.build()
        self._embedding = _embedding_of(config, builder, ranks) if ranks.pipeline.rank() == 0 else None
        rows = builder.vocabulary(EMBEDDING if config.tie_word_embeddings else f'{HEAD}.weight')
        head = ShardedHead(rows, config.vocab_size, ranks)
        super().__init__(
            config,
            head=head,
            head_path=HEAD,
            layers=linear_shapes(config),
            widths=builder.widths,
            active=builder.active,
        )
        self.experts = expert_shapes(config)
        self._parameters = builder.parameters
        self._parameter_count = builder.parameter_count
        self._frequencies = rope_frequencies(config, self.device)
        self._anchor = torch.zeros(1, device=self.device, requires_grad=True)
        self.sharding = MegatronSharding(
            head,
            ranks,
            anchor=self._anchor,
            stage_of=self._stage_of,
            divided=builder.divided,
        )
        if is_checkpointed:
            checkpoint_block(self._block, builder.active)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        ranks: MegatronRanks,
        *,
        dtype: str = 'float32',
        device: str = 'cpu',
        is_checkpointed: bool = False,
    ) -> 'MegatronCausalLM':
        """Load this rank's part of a model folder.

        Args:
            path: local folder in the Hugging Face layout, with weights in safetensors.
            ranks: groups of this rank; every rank must call `load`.
            dtype: torch dtype of the frozen weights, by name, or 'auto'; see `twinkle.nn.chosen_dtype`. Adapters are
                always float32.
            device: torch device of the model.
            is_checkpointed: whether the backward pass recomputes each layer's activations instead of storing them.

        Raises:
            UnsupportedModel: the architecture is not supported, or the numbers of ranks do not divide it.
            OSError: the folder does not contain a model.
        """
        config: PreTrainedConfig = cast('Any', AutoConfig).from_pretrained(path, local_files_only=True)
        check_supported(config, tensor_size=ranks.tensor.size(), pipeline_size=ranks.pipeline.size())
        if ranks.is_expert_parallel and not expert_shapes(config):
            raise UnsupportedModel('ep_size is for mixtures of experts; leave it out of the mesh')
        dtype = chosen_dtype(dtype, path, device=device)
        with FolderWeights(path, dtype=getattr(torch, dtype), device=torch.device(device)) as weights:
            unknown = sorted(name for name in weights.names if not is_known_weight(name))
            if unknown:
                raise UnsupportedModel(
                    f'the Megatron backend does not support the weights {unknown[:5]}; use TransformersModel'
                )
            builder = StageBuilder(config, weights, ranks, ActiveAdapters())
            return cls(config, builder, ranks, is_checkpointed=is_checkpointed)

    @property
    def base_parameters(self) -> dict[str, Tensor]:
        """This rank's parts of the frozen weights by the model's parameter names; tied weights occur once."""
        return dict(self._parameters)

    def base_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole tensor of each frozen weight, stage by stage; all ranks must read them all."""
        done: set[str] = set()
        pipeline = self._ranks.pipeline
        for stage in range(pipeline.size()):
            is_own = pipeline.rank() == stage
            for name in broadcast(list(self._parameters) if is_own else None, group=pipeline, source=stage):
                # The output head is on every stage.
                if name not in done:
                    done.add(name)
                    yield name, self._whole(name, stage)

    @property
    def parameter_count(self) -> int:
        """Number of scalars in the frozen model, on all ranks together."""
        return self._parameter_count

    @property
    def kernel_layers(self) -> list[KernelLayer]:
        """Layers of this rank whose arithmetic an external kernel can replace, in the model's order."""
        return [module for module in self._block.modules() if isinstance(module, KernelLayer)]

    def padded_count(self, *row_counts: int) -> int:
        """Return the number of rows of a pass with padding; sequence-parallel ranks can divide it evenly."""
        count = super().padded_count(*row_counts)
        while self._ranks.is_sequence_parallel and count % self._ranks.tensor.size():
            count = super().padded_count(count + 1)
        return count

    def _run(self, ids: Tensor, position_ids: Tensor, sequences: PackedSequences, media: Sequence[MediaSpan]) -> Tensor:
        del media
        ranks, is_pipeline = self._ranks, self._ranks.pipeline.size() > 1
        angles_TH = torch.outer(pad_rows(position_ids, len(ids)).float(), self._frequencies).repeat(1, 2)
        own = self._embedded(ids) if self._embedding is not None else self._received(len(ids))
        self._block.set_input_tensor(own)
        hidden: Tensor = cast('Any', self._block)(
            hidden_states=own,
            attention_mask=None,
            rotary_pos_emb=angles_TH[:, None, None, :],
            packed_seq_params=Pack(qkv_format='sbhd', sequences=sequences),
        )
        if is_pipeline:
            hidden = cast('Tensor', ToAllStages.apply(hidden, self._anchor, ranks.pipeline))
        if ranks.is_sequence_parallel:
            # Every rank computes the whole gradient of all rows, so the backward pass of a rank uses its own rows only.
            hidden = gathered_rows(hidden, ranks.tensor, is_gradient_partial=False)
        return hidden[:, 0]

    def _embedded(self, ids_T: Tensor) -> Tensor:
        """Return float [S, 1, D], the embeddings of this rank's rows."""
        embedding = cast('VocabParallelEmbedding', self._embedding)
        with torch.no_grad():
            hidden: Tensor = cast('Any', embedding)(ids_T[:, None])
            if self._ranks.is_sequence_parallel:
                hidden = own_rows(hidden, self._ranks.tensor)
        return hidden

    def _received(self, row_count: int) -> Tensor:
        """Return float [S, 1, D], the hidden states that the previous stage sends."""
        ranks = self._ranks
        count = row_count // ranks.tensor.size() if ranks.is_sequence_parallel else row_count
        like = torch.empty((count, 1, self.config.hidden_size), dtype=self.head_layer.weight.dtype, device=self.device)
        return cast('Tensor', FromPreviousStage.apply(self._anchor, like, ranks.pipeline))

    def _stage_of(self, path: str) -> int | None:
        """Return the stage of the layer at a path; None for the output head."""
        if path == self.head_path:
            return None
        index, count = int(path.split('.')[2]), self._ranks.pipeline.size()
        return next(
            stage for stage in range(count) if index in stage_layers(self.config.num_hidden_layers, stage, count)
        )

    def _whole(self, name: str, stage: int) -> Tensor:
        """Return a whole weight of a stage."""
        pipeline = self._ranks.pipeline
        whole = None
        if pipeline.rank() == stage:
            whole = cast('MegatronSharding', self.sharding).gathered(self._parameters[name])
            if name in (EMBEDDING, f'{HEAD}.weight'):
                whole = whole[: self.config.vocab_size].contiguous()
        shape = broadcast(None if whole is None else tuple(whole.shape), group=pipeline, source=stage)
        if whole is None:
            whole = torch.empty(shape, dtype=self.head_layer.weight.dtype, device=self.device)
        if pipeline.size() > 1:
            dist.broadcast(whole, group_src=stage, group=pipeline)
        return whole


def _embedding_of(config: PreTrainedConfig, builder: StageBuilder, ranks: MegatronRanks) -> VocabParallelEmbedding:
    embedding = VocabParallelEmbedding(
        padded_vocabulary(config.vocab_size, ranks.tensor.size()),
        config.hidden_size,
        init_method=nn.init.zeros_,
        config=builder.block_config,
        tp_group=ranks.tensor,
    )
    embedding.weight = builder.vocabulary(EMBEDDING)
    return embedding
