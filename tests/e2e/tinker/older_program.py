"""Program for older SDKs. Environment variables name its stack, and it prints its results as JSON.

Run it in a separate process: `python older_program.py BASE_MODEL`. It uses only features of SDK 0.16 and later.
"""

import json
import os
import sys
from typing import Any

import tinker
import torch

TOKENS = [11, 23, 5, 42, 77, 8, 19, 120]
ADAM = tinker.AdamParams(learning_rate=1e-2)


def example(**inputs: Any) -> tinker.Datum:
    """Return an example that predicts each token except the first."""
    prompt = tinker.ModelInput.from_ints(TOKENS[:-1])
    given = {name: tinker.TensorData.from_torch(torch.tensor(values)) for name, values in inputs.items()}
    targets = tinker.TensorData.from_torch(torch.tensor(TOKENS[1:]))
    return tinker.Datum(model_input=prompt, loss_fn_inputs={'target_tokens': targets, **given})


def train(model: tinker.TrainingClient, steps: int) -> list[float]:
    """Train for some steps and return the losses. Each batch is sent together with its optimizer step."""
    losses: list[float] = []
    for _ in range(steps):
        backward = model.forward_backward([example(weights=[1.0] * 7)], 'cross_entropy')
        step = model.optim_step(ADAM)
        losses.append(backward.result().metrics['loss:sum'])
        step.result()
    return losses


def logprobs(model: tinker.TrainingClient) -> list[float]:
    """Return the model's log-probability of each token except the first."""
    output = model.forward([example(weights=[1.0] * 7)], 'cross_entropy').result()
    return output.loss_fn_outputs[0]['logprobs'].to_torch().tolist()


def policy_loss(model: tinker.TrainingClient) -> float:
    """Return the sum of a policy loss whose sampler policy is the model's, so that every ratio is 1."""
    datum = example(logprobs=logprobs(model), advantages=[1.0, -2.0, 0.5, 0.0, 1.0, 1.0, 1.0])
    return model.forward_backward([datum], 'importance_sampling').result().metrics['loss:sum']


def negative_sum(_: Any, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute cross-entropy as a custom loss."""
    return -torch.cat(outputs).sum(), {}


def resumed_attention(service: tinker.ServiceClient) -> dict[str, Any]:
    """Train an adapter of only attention layers, and resume it from its saved state with and without its optimizer."""
    model = service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=3, train_mlp=False)
    train(model, 2)
    path = model.save_state('attention').result().path
    with_optimizer = service.create_training_client_from_state_with_optimizer(path)
    without_optimizer = service.create_training_client_from_state(path)
    return {
        'logprobs': [logprobs(item) for item in (model, with_optimizer, without_optimizer)],
        'losses': [train(item, 2) for item in (model, with_optimizer, without_optimizer)],
        'paths': [item.save_state('resumed').result().path for item in (with_optimizer, without_optimizer)],
    }


def main() -> None:
    """Train, save, continue from the saved state, and sample."""
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model=sys.argv[1], rank=8, seed=7)
    results: dict[str, Any] = {
        'version': tinker.__version__,
        'models': [item.model_name for item in service.get_server_capabilities().supported_models],
        'losses': train(model, 3),
        'policy loss': policy_loss(model),
        'custom loss': model.forward_backward_custom([example(weights=[1.0] * 7)], negative_sum).result().metrics,
        'lora rank': model.get_info().lora_rank,
    }
    model.optim_step(ADAM).result()
    results['path'] = model.save_state('state').result().path
    resumed = service.create_training_client_from_state_with_optimizer(results['path'])
    results['continued'] = [train(resumed, 2), train(model, 2)]
    results['trainer'] = logprobs(model)
    sampler = model.save_weights_and_get_sampling_client()
    prompt = tinker.ModelInput.from_ints(TOKENS)
    results['sampler'] = sampler.compute_logprobs(prompt).result()
    params = tinker.SamplingParams(max_tokens=5, seed=1, stop=[])
    answers = [sampler.sample(prompt, 2, params).result() for _ in range(2)]
    results['samples'] = [[sequence.tokens for sequence in answer.sequences] for answer in answers]
    named = model.save_weights_for_sampler('named').result().path
    named_sampler = service.create_sampling_client(model_path=named)
    results['named'] = [sequence.tokens for sequence in named_sampler.sample(prompt, 2, params).result().sequences]
    results['attention'] = resumed_attention(service)
    sys.stdout.write(json.dumps(results) + '\n')
    sys.stdout.flush()
    # CPython 3.11 may abort at exit while threads of the SDK run.
    os._exit(0)


if __name__ == '__main__':
    main()
