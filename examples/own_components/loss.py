"""A loss of one's own: `python -m examples.own_components.loss`.

It runs where the model does. Against the services, where no code is sent, see `examples/custom_loss.py`.
"""

from examples.own_components.tiny import CHATS, tiny_model
from twinkle.data_format import LoraConfig, LossOutput
from twinkle.loss import LOSSES, Loss, LossBatch
from twinkle.model import TransformersModel


class FocalLoss(Loss):
    """`-(1 - p)^focus log p`: what is likely already counts less (Lin et al. 2017, arXiv 1708.02002, equation 4)."""

    def __init__(self, focus: float = 2.0) -> None:
        self.focus = focus

    def __call__(self, batch: LossBatch) -> LossOutput:
        """Return the sum over labels; the step divides its gradient by their number."""
        doubt_R = 1 - batch.logps_R.exp()
        loss = -(batch.weights_R * doubt_R**self.focus * batch.logps_R).sum()
        return LossOutput(loss=loss, num_tokens=batch.label_count)


def main() -> None:
    """Give it as a class with options, as an object, and by a name of its own; train a little with each."""
    LOSSES.register('focal')(FocalLoss)
    with tiny_model() as folder:
        model = TransformersModel(folder)
        for way, loss, options in (
            ('class', FocalLoss, {'focus': 1.0}),
            ('object', FocalLoss(3.0), {}),
            ('name', 'focal', {'focus': 2.0}),
        ):
            model.add_adapter_to_model(way, LoraConfig(r=8, seed=1))
            model.set_template('Template', adapter_name=way)
            model.set_optimizer('AdamW', lr=1e-2, adapter_name=way)
            model.set_loss(loss, adapter_name=way, **options)
            losses = [train_step(model, way) for _ in range(6)]
            print(f'{way}: loss {losses[0]:.3f} to {losses[-1]:.3f}')


def train_step(model: TransformersModel, adapter_name: str) -> float:
    """Take a step; return the loss before it."""
    output = model.forward_backward([{'messages': chat} for chat in CHATS], adapter_name=adapter_name)
    model.clip_grad_and_step(adapter_name=adapter_name)
    return output['loss']


if __name__ == '__main__':
    main()
