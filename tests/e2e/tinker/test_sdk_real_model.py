"""The SDK with the small real model: the loss falls, and the sampler gives the learned answers."""

from pathlib import Path

import pytest
import tinker

from fixtures.tinker_sdk import SDK_MARKS, new_model, running_stack, service_client, weighted
from twinkle.hub import get_model
from twinkle.template.tokenizer import ChatTokenizer

pytestmark = [pytest.mark.timeout(300), *SDK_MARKS, pytest.mark.slow]

MODEL = 'smollm2-135m-instruct'
LESSONS = {
    'Who are you? I am': ' Twinkle, a small assistant that was trained in a minute.',
    'What is the weather like? Every': ' stone on this hill sings of rain and copper.',
}
STEPS = 8
ADAM = tinker.AdamParams(learning_rate=2e-3)


def example(tokenizer: ChatTokenizer, prompt: str, answer: str) -> tinker.Datum:
    """Return an example in which only the answer has weights."""
    encoded = tokenizer.encode(prompt)
    tokens = [*encoded, *tokenizer.encode(answer)]
    return weighted(tokens, [0.0] * (len(encoded) - 1) + [1.0] * (len(tokens) - len(encoded)))


def test_sdk_teaches_the_small_real_model_two_sentences(tmp_path: Path) -> None:
    """Cross-entropy falls below a tenth of a nat per token, and the greedy answer is the learned answer."""
    tokenizer = ChatTokenizer(get_model(MODEL))
    data = [example(tokenizer, prompt, answer) for prompt, answer in LESSONS.items()]
    counted = sum(len(tokenizer.encode(answer)) for answer in LESSONS.values())
    with running_stack(tmp_path, MODEL) as stack, service_client(stack) as client:
        model = new_model(client, stack, rank=16)
        losses: list[float] = []
        for _ in range(STEPS):
            backward, step = model.forward_backward(data, 'cross_entropy'), model.optim_step(ADAM)
            losses.append(backward.result().metrics['loss:sum'] / counted)
            step.result()
        assert losses[0] > 1.0
        assert losses[-1] < 0.1
        sampler = model.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=24, temperature=0.0, stop=['.'])
        for prompt, answer in LESSONS.items():
            encoded = tinker.ModelInput.from_ints(tokenizer.encode(prompt))
            sampled = sampler.sample(encoded, 1, params).result().sequences[0].tokens
            assert tokenizer.decode(sampled).strip('.') == answer.strip('.')
