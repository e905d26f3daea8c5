"""Embeddings of a version that InfoNCE has trained over the services, through OpenAI's API and the native one."""

from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from twinkle.data_format import LoraConfig, PromptProbe
from twinkle_client import TwinkleClient
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackState

pytestmark = pytest.mark.timeout(300)

PAIRS = [
    ('How do I wash a car?', 'Cleaning an automobile.'),
    ('How do I build a house?', 'Constructing a home.'),
    ('How do I choose a gift?', 'Picking a present.'),
    ('How do I carry a stone?', 'Moving a rock.'),
]
TEXTS = [text for pair in PAIRS for text in pair]
AS_CHATS = {'input_role': 'user'}
"""Renders texts as the dataset does."""
EMBED: dict[str, Any] = {'max_tokens': 0, 'prompt_probe': PromptProbe(is_embedding_returned=True)}


def encoded(stack: StackState, client: TwinkleClient) -> list[dict[str, Any]]:
    """Return the texts as features for InfoNCE: anchors have the label 1, and their positives 0."""
    dataset = Dataset(
        DatasetMeta(data=[{'messages': [{'role': 'user', 'content': text}]} for text in TEXTS]), client=client
    )
    dataset.set_template('Template', model_id=stack.base_model, max_length=128)
    dataset.encode(add_generation_prompt=True)
    (rows,) = DataLoader(dataset, batch_size=len(TEXTS))
    features: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        tokens = list(row['input_ids'])
        features.append({'input_ids': tokens, 'labels': [-100] * (len(tokens) - 1) + [1 - index % 2]})
    return features


def cosines(vectors: np.ndarray) -> tuple[float, float]:
    """Return the mean cosine of the pairs, and of all other combinations of an anchor and a positive."""
    similarities = vectors[::2] @ vectors[1::2].T
    is_pair = np.eye(len(PAIRS), dtype=bool)
    return float(similarities[is_pair].mean()), float(similarities[~is_pair].mean())


def test_vectors_have_the_similarities_that_the_trainer_reports(tiny_stack: StackState, tenant_key: str) -> None:
    """The cosines of the vectors equal the metrics of InfoNCE for each version, and training separates the pairs."""
    api = OpenAI(base_url=f'http://{tiny_stack.http_address}/v1', api_key=tenant_key, max_retries=0)
    margins: list[float] = []
    with TwinkleClient(tiny_stack.address, tenant_key) as client:
        features = encoded(tiny_stack, client)
        tokens = [[int(token) for token in feature['input_ids']] for feature in features]
        model = MultiLoraTransformersModel(tiny_stack.base_model, client=client)
        run_id = model.add_adapter_to_model('default', LoraConfig(r=8, seed=5))
        model.set_optimizer('AdamW', lr=1e-2)
        model.set_loss('InfonceLoss', temperature=0.1)
        for _ in range(2):
            metrics = model.forward_only(features)['metrics']
            version = model.publish_version()
            by_text = api.embeddings.create(model=f'{run_id}@{version}', input=TEXTS, extra_body=AS_CHATS)
            by_tokens = api.embeddings.create(model=f'{run_id}@{version}', input=tokens)
            vectors = np.asarray([item.embedding for item in by_text.data])
            np.testing.assert_allclose(vectors, [item.embedding for item in by_tokens.data], atol=1e-6)
            assert by_text.model_extra['twinkle']['version'] == version
            assert by_text.usage.prompt_tokens == sum(map(len, tokens))
            found = cosines(vectors)
            expected = (metrics['positive_similarity'], metrics['negative_similarity'])
            np.testing.assert_allclose(found, expected, atol=1e-5)
            margins.append(found[0] - found[1])
            for _ in range(10):
                model.forward_backward(features)
                model.clip_grad_and_step()
        response = Sampler(tiny_stack.base_model, client=client).sample(tokens, EMBED, 'default', version=version)
    native = np.stack([item.prompt_probe.embedding for item in response])
    np.testing.assert_allclose(native / np.linalg.norm(native, axis=1, keepdims=True), vectors, atol=1e-6)
    assert margins[1] > margins[0] + 0.1
