"""Routers of a mixture whose choice of experts can be recorded and replaced; see `twinkle.nn.expert_routing`.

Legend: T rows of the pack, E experts of a layer, A experts per token, D hidden size.
"""

from collections.abc import Collection
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from twinkle.nn.active_adapters import ActiveAdapters
from twinkle.nn.expert_routing import RoutingShape
from twinkle.nn.experts import PackedExperts

_PROBED_ROWS = 16
"""Number of random rows with which a router is compared."""

RouterKind = tuple[int, int, bool | None]
"""Number of experts, number of experts per token, and whether the weights of a token's experts are divided by their
sum. None: the weights are not the softmax of the router's logits."""


def router_kinds(part: nn.Module) -> set[RouterKind]:
    """Return the kinds of the routers below a module, without routers whose weights are divided among ranks."""
    routers: list[Any] = [module for module in part.modules() if _is_router(module)]
    return {
        (router.num_experts, router.top_k, _is_normalized(router))
        for router in routers
        if not isinstance(router.weight, DTensor)
    }


def hook_routers(text: nn.Module, active: ActiveAdapters, *, kinds: Collection[RouterKind]) -> RoutingShape | None:
    """Add hooks to a model's routers; the hooks record the chosen experts, or replace them with the experts to replay.

    Args:
        text: text model.
        active: holder of the running pass, which contains its `ExpertRouting`.
        kinds: kinds of all routers of the model.

    Returns:
        Sizes of the routing, or None if no hooks were added. Hooks require that every mixture has a router of a known
        form, that the weights are the softmax of the logits, and that all routers are of one kind.
    """
    routers: list[Any] = [module for module in text.modules() if _is_router(module)]
    layer_count = sum(isinstance(module, PackedExperts) for module in text.modules())
    if not routers or len(routers) != layer_count or len(kinds) != 1:
        return None
    ((expert_count, choice_count, is_normalized),) = kinds
    if is_normalized is None:
        return None
    for layer, router in enumerate(routers):
        router.register_forward_hook(_RouterHook(layer, active, is_normalized=is_normalized))
    return RoutingShape(layer_count, choice_count, expert_count)


class _RouterHook:
    """Forward hook of a router: records the chosen experts, or replaces them and computes new weights."""

    def __init__(self, layer: int, active: ActiveAdapters, *, is_normalized: bool) -> None:
        self._layer, self._active, self._is_normalized = layer, active, is_normalized

    def __call__(self, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
        del router, args
        routing = self._active.routing
        if routing is None:
            return output
        logits_TE, weights_TA, index_TA = output
        index_TA = routing.choose(self._layer, index_TA)
        if routing.is_replayed:
            weights_TA = _weights(logits_TE, index_TA, is_normalized=self._is_normalized).to(weights_TA.dtype)
        return logits_TE, weights_TA, index_TA


def _is_router(module: nn.Module) -> bool:
    """Return whether a module is a router of transformers that reads only hidden states."""
    return type(module).__name__.endswith('TopKRouter') and list(signature(module.forward).parameters) == [
        'hidden_states'
    ]


@torch.no_grad()
def _is_normalized(router: Any) -> bool | None:
    """Return whether a router divides its weights by their sum, or None if they are not the softmax of its logits."""
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(_PROBED_ROWS, router.weight.shape[1], generator=generator).to(router.weight)
    output = router(x_TD)
    # Routers of some models return the same values in a different order.
    if not isinstance(output, tuple) or len(output) != 3 or output[2].dtype != torch.int64:
        return None
    logits_TE, weights_TA, index_TA = output
    for is_normalized in (False, True):
        found_TA = _weights(logits_TE, index_TA, is_normalized=is_normalized).to(weights_TA.dtype)
        if torch.equal(found_TA, weights_TA):
            return is_normalized
    return None


def _weights(logits_TE: Tensor, index_TA: Tensor, *, is_normalized: bool) -> Tensor:
    """Return float32 [T, A], the weights of the replayed experts."""
    weights_TA = logits_TE.softmax(-1, dtype=torch.float32).gather(1, index_TA)
    return weights_TA / weights_TA.sum(dim=-1, keepdim=True) if is_normalized else weights_TA
