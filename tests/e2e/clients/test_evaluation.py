"""Unmodified lm-eval, LangChain, litellm and OpenAI's SDK evaluate and embed a trained version on the tiny stack."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from fixtures.client_programs import run_program
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.data_format import InputFeature, LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

CHOICES = ['red', 'blue', 'green', 'black']
QUESTIONS: list[dict[str, Any]] = [
    {'question': f'{thing} is', 'choices': [f' {choice}.' for choice in CHOICES], 'answer': index % 4}
    for index, thing in enumerate(('Blood', 'Water', 'Grass', 'Coal', 'Wine', 'Ice', 'Moss', 'Night'))
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the tokenizer of the stack's model, and the questions."""
    build_tiny_tokenizer(tmp_path)
    (tmp_path / 'questions.jsonl').write_text('\n'.join(map(json.dumps, QUESTIONS)))
    return tmp_path


def encode(folder: Path, text: str) -> list[int]:
    """Return the tokens of a text."""
    return Tokenizer.from_file(str(folder / 'tokenizer.json')).encode(text).ids


def answered(folder: Path) -> list[InputFeature]:
    """Return the questions with their answers, which alone are labels."""
    features: list[InputFeature] = []
    for row in QUESTIONS:
        prompt, answer = encode(folder, row['question']), encode(folder, row['choices'][row['answer']])
        labels = [-100] * (len(prompt) - 1) + answer + [-100]
        features.append({'input_ids': np.asarray(prompt + answer), 'labels': np.asarray(labels)})
    return features


def likelihoods(sampler: Sampler, folder: Path, **version: Any) -> list[list[float]]:
    """Return the log-likelihood of each choice of each question from the sampler's own method."""
    found: list[list[float]] = []
    for row in QUESTIONS:
        prompt = encode(folder, row['question'])
        sequences = [prompt + encode(folder, choice) for choice in row['choices']]
        scores = sampler.compute_logprobs(sequences, **version)
        found.append([float(score[len(prompt) :].sum()) for score in scores])
    return found


def test_trained_version_is_evaluated(tiny_stack: StackState, tenant_key: str, folder: Path) -> None:
    """The accuracies of lm-eval rise to 1 with training, and its log-likelihoods are those of the sampler."""
    with TwinkleClient(tiny_stack.address, tenant_key) as client:
        model = MultiLoraTransformersModel(tiny_stack.base_model, client=client)
        run_id = model.add_adapter_to_model('default', LoraConfig(r=16, seed=3))
        model.set_optimizer('AdamW', lr=1e-2)
        features = answered(folder)
        for _ in range(60):
            model.forward_backward(features)
            model.clip_grad_and_step(1.0)
        version = model.publish_version()
        trained = f'{run_id}@{version}'
        names = (tiny_stack.base_model, trained)
        program = run_program(
            'evaluation.py', f'http://{tiny_stack.http_address}/v1', str(folder), *names, OPENAI_API_KEY=tenant_key
        )
        results = asyncio.run(program)
        sampler = Sampler(tiny_stack.base_model, client=client)
        expected = likelihoods(sampler, folder, adapter_name=run_id, version=version)
        base = likelihoods(sampler, folder)
    assert results[trained]['choices'] == results[trained]['answers'] == 1.0
    assert results[tiny_stack.base_model]['choices'] < 1.0
    np.testing.assert_allclose(results[trained]['likelihoods'], expected, atol=1e-3)
    np.testing.assert_allclose(results[tiny_stack.base_model]['likelihoods'], base, atol=1e-3)
    vectors = {name: np.asarray(found) for name, found in results['embeddings'].items()}
    assert vectors['openai'].shape == (len(QUESTIONS), 64)
    np.testing.assert_allclose(np.linalg.norm(vectors['openai'], axis=1), 1.0, rtol=1e-5)
    for one, other in pairwise(vectors.values()):
        np.testing.assert_allclose(one, other, atol=1e-6)
