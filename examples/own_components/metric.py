"""A custom metric: `python -m examples.own_components.metric`."""

import math

from examples.own_components.tiny import CHATS, tiny_model
from twinkle.data_format import LoraConfig
from twinkle.metric import METRICS, CountingMetric, ForwardFacts
from twinkle.model import TransformersModel


class Perplexity(CountingMetric):
    """The exponential of the mean negative log-probability of a label."""

    def accumulate(self, facts: ForwardFacts) -> None:
        if facts.labels is not None:
            self.add('nats', -float(facts.labels.logps_R.sum()))
            self.add('labels', facts.label_count)

    def calculate(self) -> dict[str, float]:
        """Return the perplexity of the accumulated batches."""
        return {'perplexity': math.exp(self.total('nats') / self.total('labels'))} if self.total('labels') else {}


def main() -> None:
    """Use the metric for training, where it is given as a class, and for evaluation, where it is given by name."""
    METRICS.register()(Perplexity)
    batch = [{'messages': chat} for chat in CHATS]
    with tiny_model() as folder:
        model = TransformersModel(folder)
        model.add_adapter_to_model('default', LoraConfig(r=8, seed=1))
        model.set_template('Template')
        model.set_optimizer('AdamW', lr=1e-2)
        model.add_metric(Perplexity)
        model.add_metric('Perplexity', is_training=False)
        for round_ in range(3):
            for _ in range(4):
                model.forward_backward(batch)
                model.clip_grad_and_step()
            model.forward_only(batch[:1])
            training, evaluation = model.calculate_metric(), model.calculate_metric(is_training=False)
            print(f'round {round_}: training {training["perplexity"]:.1f}, one chat {evaluation["perplexity"]:.1f}')


if __name__ == '__main__':
    main()
