"""A stack with a mixture of experts: expert adapters, and routing replay with a sampler's experts."""

from collections.abc import Iterator

import numpy as np
import pytest

from fixtures.mixture_model import CONFIG, build_mixture
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient, UsageError
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = list(range(3, 20))
PARAMS = {'max_tokens': 5, 'seed': 1, 'ignore_eos': True, 'return_routed_experts': True}
LORA = LoraConfig(r=4, seed=1, target_modules=('all-linear', 'all-experts'))


@pytest.fixture(scope='module')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """A running stack with the torch engine."""
    model = build_tiny_tokenizer(build_mixture(tmp_path_factory.mktemp('bases') / 'mixture'))
    folder = tmp_path_factory.mktemp('stack')
    yield start_stack(StackOptions(state_dir=folder, base_model=str(model), engine='torch'), report=_silent)
    stop_stack(folder, report=_silent)


def test_policy_trains_with_the_experts_of_its_samples(stack: StackState) -> None:
    """Samples of a published adapter have the experts of each token, and the trainer uses the same experts."""
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        model, sampler = (
            MultiLoraTransformersModel(stack.base_model, client=client),
            Sampler(stack.base_model, client=client),
        )
        model.add_adapter_to_model('policy', LORA)
        model.set_optimizer('AdamW', lr=5e-2)
        batch = [{'input_ids': PROMPT, 'labels': [*PROMPT[1:], -100]}]
        for _ in range(3):
            model.forward_backward(batch)
            model.clip_grad_and_step()
        version = model.publish_version()
        (response,) = sampler.sample(PROMPT, PARAMS, 'policy', version=version, num_samples=2)
        features = [sequence.new_input_feature for sequence in response.sequences]
        output = model.forward_backward(features, return_routed_experts=True)
        shape = (len(PROMPT) + 5 - 1, CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok)
        for feature, experts, logps in zip(features, output['routed_experts'], output['logps'], strict=True):
            assert feature['routed_experts'].shape == shape
            assert np.array_equal(experts[: shape[0]], feature['routed_experts'])
            np.testing.assert_allclose(logps, feature['old_logps'], atol=1e-4)
        *_, last = sampler.sample_stream(PROMPT, PARAMS, 'policy', version=version)
        assert np.array_equal(last.routed_experts, features[0]['routed_experts'])
        other = np.roll(features[0]['routed_experts'], 1, axis=0)
        changed = model.forward_only([{**features[0], 'routed_experts': other}])
        assert not np.allclose(changed['logps'][0], features[0]['old_logps'], atol=1e-4)


def test_wrong_experts_are_refused_by_the_service(stack: StackState) -> None:
    """The error for experts that do not fit the model names the field, and training continues."""
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        model.add_adapter_to_model('policy', LORA)
        feature = {'input_ids': PROMPT, 'labels': PROMPT}
        with pytest.raises(UsageError, match='routed_experts'):
            model.forward_backward([{**feature, 'routed_experts': np.zeros((len(PROMPT), 9, 2), np.uint8)}])
        assert model.forward_backward([feature])['loss'] > 0


def _silent(service: str, event: str) -> None:
    del service, event
