"""Trainer of many adapters, composed of classes that each implement some of its methods."""

from twinkle.model.engine.configuring import Configuring
from twinkle.model.engine.pass_group import PassGroup
from twinkle.model.engine.persistence import Persistence
from twinkle.model.engine.stepping import Stepping
from twinkle.model.engine.training import Training
from twinkle.nn import PackedModel


class TrainerEngine(Configuring, Training, Stepping, Persistence):
    """Many adapters on one frozen model, each with its own optimizer, schedule, loss and metrics.

    Every method completes, or raises an error and changes no weights, gradients or counters. A gradient is applied once
    `gradient_accumulation_steps` batches are accumulated. Until then, clip_grad_norm, step, zero_grad and lr_step do
    nothing.

    Args:
        model: model shared by all adapters.
        max_pass_tokens: maximum number of rows of one pass, which bounds memory. Batches of several adapters share a
            pass. A batch with more rows runs in several passes with summed gradients, if its loss is a sum over
            features. The division of a batch does not depend on the batches of other adapters.
        group: ranks that share the passes of each batch. Every rank must make the same calls on equal adapters. All
            ranks receive the same results; see `PassGroup`. None for this process alone.

    Concurrency: use the engine in one thread.
    """

    def __init__(self, model: PackedModel, *, max_pass_tokens: int = 1024, group: PassGroup | None = None) -> None:
        super().__init__(model, max_pass_tokens=max_pass_tokens, group=group)
