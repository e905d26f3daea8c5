"""Results of a forward pass and of a loss. Arrays are NumPy arrays; only the loss of a `LossOutput` is a tensor.

Legend: N features, T tokens of the longest feature, V ids in the vocabulary, D embedding width.
"""

from typing import Any, TypedDict


class ModelOutput(TypedDict, total=False):
    """Result of a forward pass over a batch."""

    loss: float
    """Loss of the batch with the scaling of the optimizer step; see `ForwardResult.loss`."""
    logps: list[Any]
    """N arrays, float32, one value per token: natural log-probability of each label, 0.0 where it is ignored."""
    logits: Any
    """float32 [N, T, V]; present only if requested."""
    values: Any
    """float32 [N, T]; present only for value models."""
    embeddings: Any
    """float32 [N, D]; present only for embedding tasks."""
    routed_experts: list[Any]
    """N arrays, uint8 or int32 [tokens of the feature, layers with experts, experts per token]: experts of each token;
    present only if requested."""
    num_tokens: int
    """Number of labels that count."""
    metrics: dict[str, float]
    """Values that the loss reports, by name."""


class LossOutput(TypedDict, total=False):
    """Result of a loss."""

    loss: Any
    """Scalar with a gradient."""
    num_tokens: int
    """Divisor of the loss. The optimizer step divides the gradient of the summed losses by the sum of their divisors; 0
    means no division."""
    metrics: dict[str, float]
    """Values to report, by name. A value is a mean unless its name ends with `:sum`, `:min` or `:max`."""
    metric_weight: float
    """Number of items in the means, which is the weight of the means if a batch is computed in parts. Defaults to 1."""
