"""Sharding of a model's weights with torch's `fully_shard` (FSDP2).

Every rank has complete adapters. A rank stores its share of the base weights. While a pass runs, it also stores up to
two whole layers, the embedding and the output head. If the base weights are trained, FSDP adds the gradients of all
ranks, and each rank stores its share of the sum.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from twinkle.data_format import media_spec
from twinkle.nn import UnsupportedModel


class FsdpSharding:
    """Implements `twinkle.nn.LoadSharding` with FSDP2.

    Every rank of the mesh must create an instance and load the same model.

    Args:
        mesh: mesh of torch with one axis, or with two: the first replicates, the second shards.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._layers: Sequence[nn.Module] = ()
        self._backbone: Any = None
        self._embedding: Any = None
        self._head: Any = None
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._is_running = False
        """Whether a pass is in `running_pass`. Tensors of other passes are not kept."""
        self._is_backward_done = False

    def divide(self, model: PreTrainedModel) -> None:
        """Divide the parameters of a model; they may be on the meta device.

        Raises:
            UnsupportedModel: the model has a vision or audio tower, or no decoder layers that can be sharded.
        """
        if media_spec(model.config.to_dict()) is not None:
            raise UnsupportedModel('only text models can be sharded; leave fsdp_size out of the mesh')
        backbone: Any = model.base_model
        # The decoder layers of transformers have this class; all other weights stay in the group of the backbone.
        layers = [layer for layer in backbone.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not layers:
            raise UnsupportedModel(
                f'{type(backbone).__name__} has no decoder layers to shard; leave fsdp_size out of the mesh'
            )
        self._backbone, self._embedding, self._layers = backbone, backbone.get_input_embeddings(), layers
        self._head = model.get_output_embeddings()
        self._divide()
        # This hook runs before FSDP's hook, which registers the end of a backward pass only for inputs with gradients.
        layers[0].register_forward_pre_hook(self._require_input_gradient, prepend=True, with_kwargs=True)
        backbone.register_forward_hook(self._keep_output)

    def _divide(self) -> None:
        for layer in self._layers:
            fully_shard(layer, mesh=self._mesh)
        # The head's weight is used without a call of its forward, so FSDP's hooks do not run for it.
        ends = [self._embedding] if self._head is None else [self._embedding, self._head]
        fully_shard(ends, mesh=self._mesh, reshard_after_forward=False)
        fully_shard(self._backbone, mesh=self._mesh)
        for module in (*self._layers, self._embedding, self._backbone):
            sharded = cast('FSDPModule', module)
            # The passes of the ranks are parts of one batch, whose gradients are added and not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(enable=True)
            # A pass without a loss does not reach the head, but the other ranks wait for its gradient.
            sharded.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)

    def whole_parts(self) -> Iterator[nn.Module]:
        """Yield the layers one after the other with whole weights, then the backbone with its other weights."""
        for layer in self._layers:
            cast('FSDPModule', layer).unshard()
            yield layer
            cast('FSDPModule', layer).reshard()
        with self.whole_weights():
            yield self._backbone

    @property
    def needs_every_rank(self) -> bool:
        """Always True: all ranks gather a layer's weights when a pass reaches it."""
        return True

    def agree(self, errors: Sequence[Exception | None]) -> list[Exception | None]:
        """Return the errors unchanged: each rank runs its own passes, so the ranks need not agree."""
        return list(errors)

    def complete(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the gradients of adapters, which are complete on the rank that ran the pass."""
        return [gradient for _, gradient in gradients]

    @property
    def pass_inputs(self) -> Sequence[Tensor]:
        """Input of the first layer, if gradients are recorded."""
        return [] if self._input is None else [self._input]

    def gathered(self, parameter: Tensor) -> Tensor:
        """Return the full tensor of a sharded parameter. Every rank must call it."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gather all weights outside of the layers for the block. Every rank must enter it."""
        self._embedding.unshard()
        self._backbone.unshard()
        try:
            yield
        finally:
            self._embedding.reshard()
            # FSDP keeps the weights of the root after a pass without a backward pass; they would be stale after a step.
            self._backbone.reshard()

    @contextmanager
    def running_pass(self) -> Iterator[None]:
        """Enter `whole_weights`, and run a backward pass with zero gradients if a training pass ran none."""
        self._is_running, self._is_backward_done = True, False
        with self.whole_weights():
            try:
                yield
                if self._input is not None and self._output is not None and not self._is_backward_done:
                    self._run_zero_backward(self._output, self._input)
            finally:
                self._is_running, self._input, self._output = False, None, None

    def _run_zero_backward(self, output: Tensor, first_input: Tensor) -> None:
        zeros = torch.zeros_like(output)
        if any(parameter.requires_grad for module in (self._backbone, self._head) for parameter in module.parameters()):
            # Only this function triggers the hooks of FSDP that add the gradients of the other ranks.
            torch.autograd.backward(output, zeros)
        else:
            torch.autograd.grad(output, first_input, zeros)

    def _require_input_gradient(self, layer: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Make the first layer's input require a gradient, so that every backward pass reaches the first layer."""
        del layer
        hidden: Tensor = args[0] if args else options['hidden_states']
        # A layer that is recomputed for the backward pass receives its input a second time.
        if not self._is_running or not torch.is_grad_enabled() or self._input is not None:
            return
        # With activation checkpointing, transformers has already made the input require a gradient.
        self._input = hidden if hidden.requires_grad else hidden.requires_grad_()
        self._input.register_hook(self._on_backward)

    def _keep_output(self, backbone: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del backbone, args
        self._output = output.last_hidden_state if self._input is not None else None

    def _on_backward(self, gradient: Tensor) -> None:
        del gradient
        self._is_backward_done = True
