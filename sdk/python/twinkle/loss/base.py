"""The seam between the trainer and a loss.

Legend: R labels that count, in the order of the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from twinkle.data_format import IGNORE_INDEX, LossOutput


class MissingStream(ValueError):
    """A loss needs a per-token stream that the features do not carry."""

    def __init__(self, loss: str, name: str) -> None:
        super().__init__(f'{loss} needs {name} on every feature')
        self.loss, self.name = loss, name


@dataclass(frozen=True)
class LossBatch:
    """What a loss may read: one element for each label that counts."""

    logps_R: Tensor
    """float32 [R], with gradient: natural log-probability of each label."""
    labels_R: Tensor
    """int64 [R]."""
    weights_R: Tensor
    """float32 [R]: factor of each label's loss."""
    features_R: Tensor
    """int64 [R], rising: index of the feature each label belongs to."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 [R] by name, such as `advantages`, `old_logps`, `ref_logps`."""

    def feature_sum(self, values_R: Tensor) -> Tensor:
        """Return float32 [features]: the sum of `values_R` within each feature that has labels."""
        _, inverse = np.unique(self.features_R.numpy(force=True), return_inverse=True)
        index = self.features_R.new_tensor(inverse)
        return values_R.new_zeros(int(index.max()) + 1 if len(inverse) else 0).index_add(0, index, values_R)


class Loss(ABC):
    """A loss. Subclass it, or give any callable of the same form, for one of your own.

    Concurrency: stateless; one instance may serve many batches.
    """

    ignore_index: int = IGNORE_INDEX
    """Label that does not count."""
    is_separable: bool = True
    """Whether the loss of a batch is the sum over its features, so that a large one may run in parts."""
    required_streams: ClassVar[tuple[str, ...]] = ()
    """Streams every feature must carry."""

    @abstractmethod
    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the loss as a sum, a scalar with gradient.

        `num_tokens` is what the gradient is divided by at the step; 0 for not at all.
        """
