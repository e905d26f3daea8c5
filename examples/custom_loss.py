"""A loss of your own, computed here: `twinkle up`, then `python -m examples.custom_loss`.

The service computes log-probabilities and gradients of the weights; what is made of the log-probabilities is
this file's business, in plain numpy. No code is sent.
"""

from typing import Any

import numpy as np

from twinkle.data_format import LoraConfig
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel

FOCUS = 2.0
"""How much more a token counts that the model finds unlikely; 0 is cross-entropy."""


def focal_loss(
    features: list[dict[str, Any]], logps: list[np.ndarray]
) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """Return the mean over labels of -(1 - p)^FOCUS log p (Lin et al. 2017, arXiv:1708.02002, equation 4).

    Its derivative by log p is (1 - p)^(FOCUS - 1) (FOCUS p log p - (1 - p)).
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
    """Train a few steps and print what the loss says."""
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
            print(f'step {step} loss {output["loss"]:.3f}, {output["metrics"]["likely"]:.0%} of the tokens are likely')
            if step == 5:
                break
        model.undo(2)
        print('two steps back, after', model.get_adapter().step_count)
        model.remove_adapter()


if __name__ == '__main__':
    main()
