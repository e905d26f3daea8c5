"""The trainer on one device: all its verbs in one class. Each room of them is a module of its own."""

from twinkle.model.engine.configuring import Configuring
from twinkle.model.engine.keeping import Keeping
from twinkle.model.engine.stepping import Stepping
from twinkle.model.engine.training import Training
from twinkle.nn import PackedCausalLM


class TrainerEngine(Configuring, Training, Stepping, Keeping):
    """Many adapters on one frozen model, each with its own optimizer, schedule, loss and metrics.

    Every verb either does all of its work or raises and changes nothing. An accumulated gradient is
    applied once `gradient_accumulation_steps` batches are in it: until then clip_grad_norm, step,
    zero_grad and lr_step do nothing.

    Args:
        model: shared by all adapters.
        max_pass_tokens: rows of one pass. Batches of several adapters share it; a batch of more tokens
            runs in several whose gradients are added up, where its loss is a sum over features. Bounds
            memory. How a batch is cut into passes depends on this and the batch alone.

    Concurrency: drive it from one thread.
    """

    def __init__(self, model: PackedCausalLM, *, max_pass_tokens: int = 1024) -> None:
        super().__init__(model, max_pass_tokens=max_pass_tokens)
