"""A custom loss: `python -m examples.own_components.loss`.

The loss runs in the process of the model. For custom losses with the services, see `examples/custom_loss.py`.
"""

from examples.own_components.tiny import CHATS, tiny_model
from twinkle.data_format import LoraConfig, LossOutput
from twinkle.loss import LOSSES, Loss, LossBatch
from twinkle.model import TransformersModel


class FocalLoss(Loss):
    """Focal loss `-(1 - p)^focus log p`, which reduces the weight of likely tokens (arXiv 1708.02002, equation 4)."""

    def __init__(self, focus: float = 2.0) -> None:
        self.focus = focus

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the sum over the R labels; the optimizer step divides the gradient by their number."""
        complement_R = 1 - batch.logps_R.exp()
        loss = -(batch.weights_R * complement_R**self.focus * batch.logps_R).sum()
        return LossOutput(loss=loss, num_tokens=batch.label_count)


def main() -> None:
    """Train a few steps with the loss given as a class with options, as an instance, and by name."""
    LOSSES.register('focal')(FocalLoss)
    with tiny_model() as folder:
        model = TransformersModel(folder)
        for kind, loss, options in (
            ('class', FocalLoss, {'focus': 1.0}),
            ('object', FocalLoss(3.0), {}),
            ('name', 'focal', {'focus': 2.0}),
        ):
            model.add_adapter_to_model(kind, LoraConfig(r=8, seed=1))
            model.set_template('Template', adapter_name=kind)
            model.set_optimizer('AdamW', lr=1e-2, adapter_name=kind)
            model.set_loss(loss, adapter_name=kind, **options)
            losses = [train_step(model, kind) for _ in range(6)]
            print(f'{kind}: loss {losses[0]:.3f} to {losses[-1]:.3f}')


def train_step(model: TransformersModel, adapter_name: str) -> float:
    """Run one step and return the loss before it."""
    output = model.forward_backward([{'messages': chat} for chat in CHATS], adapter_name=adapter_name)
    model.clip_grad_and_step(adapter_name=adapter_name)
    return output['loss']


if __name__ == '__main__':
    main()
