"""The torch sampler embeds texts as the trainer does, with an adapter that InfoNCE has trained."""

from pathlib import Path

import numpy as np
import pytest

from twinkle.data_format import InputFeature, LoraConfig, PromptProbe, SamplingParams
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

TEXTS = ['How do I wash a car?', 'Cleaning an automobile.', 'How do I build a house?', 'Building a home.']
EMBED = SamplingParams(max_tokens=0, prompt_probe=PromptProbe(is_embedding_returned=True))


@pytest.fixture(scope='module')
def features(tiny_llama_dir: Path) -> list[InputFeature]:
    """The texts as pairs for InfoNCE, encoded without a chat template."""
    dataset = Dataset(DatasetMeta(data=[{'messages': [{'role': 'user', 'content': text}]} for text in TEXTS]))
    dataset.set_template('Template', model_id=str(tiny_llama_dir), use_chat_template=False, max_length=64)
    dataset.encode(add_generation_prompt=True)
    return [{'input_ids': row['input_ids'], 'labels': [1 - index % 2]} for index, row in enumerate(dataset[:])]


def test_sampler_and_trainer_compute_the_same_embeddings(tiny_llama_dir, features, tmp_path):
    """Both compute the same hidden states before and after training, which changes them."""
    model = TransformersModel(str(tiny_llama_dir))
    model.add_adapter_to_model('default', LoraConfig(r=4, seed=1))
    model.set_optimizer('AdamW', lr=1e-2)
    model.set_loss('InfonceLoss', temperature=0.1)
    sampler = TorchSampler(str(tiny_llama_dir))
    tokens = [[int(token) for token in feature['input_ids']] for feature in features]
    found: list[np.ndarray] = []
    for step in range(3):
        trained = model.forward_only(features, task='embedding')['embeddings']
        sampler.add_adapter_to_sampler('mine', model.save(f'step-{step}', str(tmp_path)))
        responses = sampler.sample(tokens, EMBED, 'mine')
        embedded = np.stack([response.prompt_probe.embedding for response in responses])
        np.testing.assert_allclose(embedded, trained, rtol=1e-5, atol=1e-5)
        assert all(response.sequences[0].tokens == [] for response in responses)
        found.append(embedded)
        model.forward_backward(features, task='embedding')
        model.clip_grad_and_step()
    assert np.abs(found[0] - found[2]).max() > 1e-2


def test_texts_are_tokenized_as_the_dataset_encodes_them(tiny_llama_dir, features):
    """A text of `/v1/embeddings` has the tokens of a dataset without a chat template."""
    tokenizer = TorchSampler(str(tiny_llama_dir)).template.tokenizer
    for text, feature in zip(TEXTS, features, strict=True):
        np.testing.assert_array_equal(tokenizer.encode(text), feature['input_ids'])
