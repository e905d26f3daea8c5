"""What a model's forward pass and a loss give back. Arrays are torch tensors in process, numpy over the wire."""

from typing import Any, TypedDict


class ModelOutput(TypedDict, total=False):
    """Result of a forward pass over a batch of N features, padded to their longest T."""

    loss: float
    """The batch's loss, a sum unless the loss says otherwise."""
    logps: list[Any]
    """N arrays, float32 [T]: natural log-probability of each label, 0.0 where masked."""
    logits: Any
    """float32 [N, T, V]; only where asked for."""
    values: Any
    """float32 [N, T]; value models only."""
    embeddings: Any
    """float32 [N, D]; embedding tasks only."""
    num_tokens: int
    """Number of labels that count."""
    metrics: dict[str, float]
    """What the loss reports, by name."""


class LossOutput(TypedDict, total=False):
    """What a loss returns."""

    loss: Any
    """Scalar with gradient."""
    num_tokens: int
    """0: `loss` is already an average; else the sum of it is divided by this at the step."""
    metrics: dict[str, float]
    """Numbers to report, by name: means, or where the name ends in `:sum`, `:min` or `:max` what it says."""
    metric_weight: float
    """How many things the means are of, to weigh them by where a batch ran in parts; unset: 1."""
