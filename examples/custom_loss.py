"""A custom loss that this program computes: `twinkle up`, then `python -m examples.custom_loss`.

The service computes the log-probabilities and the gradients of the weights. This program computes the loss and its
gradient from the log-probabilities, in plain numpy. No code is sent to the service.
"""

from typing import Any

import numpy as np

from twinkle.data_format import LoraConfig
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel

FOCUS = 2.0
"""Exponent that reduces the weight of likely tokens; 0 gives cross-entropy."""


def focal_loss(
    features: list[dict[str, Any]], logps: list[np.ndarray]
) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """Return the focal loss, its gradient for each feature, and a metric.

    The loss is the mean of -(1 - p)^FOCUS log p over the labels (Lin et al. 2017, arXiv:1708.02002, equation 4). Its
    derivative with respect to log p is (1 - p)^(FOCUS - 1) (FOCUS p log p - (1 - p)).
    """
    count = sum(int((feature['labels'] != -100).sum()) for feature in features)
    loss, gradients, likely = 0.0, [], 0
    for feature, logp in zip(features, logps, strict=True):
        is_label = feature['labels'] != -100
        p = np.exp(logp)
        loss += float((-((1 - p) ** FOCUS) * logp)[is_label].sum()) / count
        slope = (1 - p) ** (FOCUS - 1) * (FOCUS * p * logp - (1 - p))
        gradients.append(np.where(is_label, slope / count, 0.0))
        likely += int((p > 0.5)[is_label].sum())
    return loss, gradients, {'likely': likely / count}


def main() -> None:
    """Train six steps, print the loss of each, and undo two steps."""
    with init_twinkle_client() as client:
        services = client.get_server_info().services
        (model_id,) = {base.base_model for service in services for base in service.base_models if base.is_trainable}
        dataset = Dataset('examples/data/self_cognition.jsonl')
        dataset.set_template('Template', model_id=model_id, max_length=256)
        dataset.map('SelfCognitionProcessor', init_args={'model_name': 'Twinkle', 'model_author': 'the Twinkle team'})
        dataset.encode()
        model = MultiLoraTransformersModel(model_id, client=client)
        model.add_adapter_to_model('focal', LoraConfig(r=8))
        model.set_optimizer('AdamW', lr=4e-3)
        for step, batch in enumerate(DataLoader(dataset, batch_size=8)):
            output = model.forward_backward_custom(batch, focal_loss, framework='numpy')
            model.clip_grad_and_step()
            print(f'step {step} loss {output["loss"]:.3f}, {output["metrics"]["likely"]:.0%} of labels have p > 0.5')
            if step == 5:
                break
        model.undo(2)
        print('two steps undone; the step count is', model.get_adapter().step_count)
        model.remove_adapter()


if __name__ == '__main__':
    main()
