"""Both sampler engines agree with transformers + peft and with the trainer, for trained adapters of a real model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import pytest_asyncio
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures.engine_requests import make_request, run, sampled_logprobs, score
from fixtures.sampler_engines import need_vllm
from twinkle.data_format import LoraConfig, TensorData
from twinkle.hub import get_model
from twinkle.model import TransformersModel
from twinkle_services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions
from twinkle_services.sampler.domain.adapter import AdapterKey, AdapterWeights, VersionKey
from twinkle_services.sampler.ports import SamplerEngine

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(600), pytest.mark.slow]

MODEL = 'smollm2-135m-instruct'
TOLERANCE = 1e-4
"""Maximum difference between an engine's log-probabilities and those of transformers + peft, in float32."""
NEW_TOKENS = 16
TEXTS = {
    'first': 'Who are you? I am Twinkle, a small assistant that was trained in a minute.',
    'second': 'What is the weather like? Every stone on this hill sings of rain and copper.',
}
PROMPTS = ('Who are you? I am', 'The capital of France is')
KEYS = {name: VersionKey(AdapterKey('alice', name), 1) for name in TEXTS}


@dataclass
class Trained:
    """Two trained adapters, their trainer, and a peft model with both of them."""

    trainer: TransformersModel
    weights: dict[str, AdapterWeights]
    plain: peft.PeftModel
    tokenizer: Any
    _generated: dict[tuple[str, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.tokenizer(text)['input_ids'])

    def trainer_scores(self, name: str, ids: list[int]) -> np.ndarray:
        """Return the trainer's log-probability of each token except the first."""
        feature = {'input_ids': ids, 'labels': [*ids[1:], -100]}
        return np.array(self.trainer.forward_only([feature], adapter_name=name)['logps'][0][:-1], dtype=np.float64)

    def generate(self, name: str, prompt: list[int]) -> list[int]:
        """Return the greedy completion of transformers; an empty name means the base model."""
        key = (name, tuple(prompt))
        if key not in self._generated:
            self._generated[key] = self._generate(name, prompt)
        return self._generated[key]

    def _generate(self, name: str, prompt: list[int]) -> list[int]:
        with torch.no_grad(), self._with(name):
            input_ids = torch.tensor([prompt])
            generated = self.plain.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        return generated[0, len(prompt) :].tolist()

    def score(self, name: str, ids: list[int]) -> np.ndarray:
        """Return peft's log-probability of each token except the first."""
        with torch.no_grad(), self._with(name):
            logits = self.plain(input_ids=torch.tensor([ids[:-1]])).logits[0].double()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()

    def _with(self, name: str) -> Any:
        self.plain.set_adapter(name or 'first')
        return nullcontext() if name else self.plain.disable_adapter()


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train two adapters for four steps each and load them into plain peft."""
    folder = get_model(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = TransformersModel(MODEL, device='cpu')
    saved: dict[str, Path] = {}
    for seed, (name, text) in enumerate(TEXTS.items()):
        trainer.add_adapter_to_model(name, LoraConfig(r=8, lora_alpha=20, use_rslora=seed == 1, seed=seed))
        trainer.set_optimizer('AdamW', lr=1e-3, adapter_name=name)
        ids = tokenizer(text)['input_ids']
        for _ in range(4):
            trainer.forward_backward([{'input_ids': ids[:-1], 'labels': ids[1:]}], adapter_name=name)
            trainer.clip_grad_and_step(adapter_name=name)
        saved[name] = Path(trainer.save(name, str(tmp_path_factory.mktemp(name)), adapter_name=name))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(base, saved['first'], adapter_name='first')
    plain.load_adapter(saved['second'], adapter_name='second')
    weights = {name: read_weights(name, path) for name, path in saved.items()}
    return Trained(trainer, weights, plain.eval(), tokenizer)


def read_weights(name: str, folder: Path) -> AdapterWeights:
    """Return the weights in a saved peft folder as version 1."""
    arrays = load_file(folder / 'adapter_model.safetensors')
    tensors = {key: TensorData.from_numpy(array) for key, array in arrays.items()}
    return AdapterWeights(
        adapter_id=name,
        version=1,
        base_model=MODEL,
        lora_config=LoraConfig.of(peft.PeftConfig.from_pretrained(str(folder))),
        tensors=tensors,
        size_bytes=sum(len(tensor.data) for tensor in tensors.values()),
        digest='0' * 64,
    )


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def torch_engine(trained: Trained) -> AsyncIterator[SamplerEngine]:
    """Torch engine with both adapters."""
    engine = TorchEngine(TorchEngineOptions(base_model=MODEL, folder=str(get_model(MODEL))))
    await load_both(engine, trained)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def vllm_engine(trained: Trained) -> AsyncIterator[SamplerEngine]:
    """Engine of vLLM with both adapters in its two slots, so that no slot is free for the base model."""
    need_vllm()
    from twinkle_services.sampler.backends.vllm_engine import VllmEngine, VllmEngineOptions  # noqa: PLC0415 (slow import)

    arguments = {'max_loras': 2, 'max_model_len': 512, 'max_num_seqs': 16, 'kv_cache_memory_bytes': 256 << 20}
    options = VllmEngineOptions(base_model=MODEL, folder=str(get_model(MODEL)), arguments=arguments)
    engine = await VllmEngine.start(options)
    await load_both(engine, trained)
    yield engine
    await engine.close()


@pytest.fixture(params=['torch', 'vllm'])
def engine(request: pytest.FixtureRequest) -> SamplerEngine:
    """Each engine; the test runs once per engine."""
    return request.getfixturevalue(f'{request.param}_engine')


async def load_both(engine: SamplerEngine, trained: Trained) -> None:
    for name, key in KEYS.items():
        await engine.load_adapter(key, trained.weights[name])


async def test_greedy_tokens_equal_those_of_transformers(engine, trained):
    """Completions of the base model and both adapters in one batch have the tokens of transformers + peft."""
    requests = [(name, trained.ids(prompt)) for name in ('', *TEXTS) for prompt in PROMPTS]
    answers = await asyncio.gather(
        *(
            run(
                engine,
                make_request(
                    f'{index}',
                    KEYS.get(name),
                    prompt=ids,
                    max_tokens=NEW_TOKENS,
                    temperature=0,
                    ignore_eos=False,
                ),
            )
            for index, (name, ids) in enumerate(requests)
        )
    )
    completions = set()
    for (name, ids), answer in zip(requests, answers, strict=True):
        assert answer.tokens[0] == trained.generate(name, ids)
        expected = trained.score(name, [*ids, *answer.tokens[0]])[len(ids) - 1 :]
        np.testing.assert_allclose(sampled_logprobs(answer), expected, rtol=0, atol=TOLERANCE)
        completions.add((tuple(ids), tuple(answer.tokens[0])))
    assert len(completions) > 2 * len(PROMPTS)


async def test_prompt_scores_agree_with_peft(engine, trained):
    """Concurrent scores of each text with each model agree with peft within 1e-4."""
    requests = [(name, trained.ids(text)) for name in ('', *TEXTS) for text in TEXTS.values()]
    found = await asyncio.gather(*(score(engine, KEYS.get(name), ids) for name, ids in requests))
    for (name, ids), logprobs in zip(requests, found, strict=True):
        np.testing.assert_allclose(logprobs, trained.score(name, ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('name', TEXTS)
async def test_trainer_and_sampler_agree(engine, trained, name):
    """Log-probabilities of a version equal the trainer's bitwise on the torch engine, and within 1e-4 on vLLM."""
    ids = trained.ids(' '.join(TEXTS.values()))
    tolerance = TOLERANCE if engine.facts.engine == 'vllm' else 0.0
    found = await score(engine, KEYS[name], ids)
    np.testing.assert_allclose(found, trained.trainer_scores(name, ids), rtol=0, atol=tolerance)


async def test_sampled_tokens_have_the_trainers_logprobs(engine, trained):
    """Sampled tokens have the trainer's log-probabilities within 1e-4, so an RL step starts with a ratio of 1."""
    prompt = trained.ids(PROMPTS[0])
    sampled = await run(engine, make_request(adapter=KEYS['first'], prompt=prompt, max_tokens=NEW_TOKENS, seed=11))
    ids = [*prompt, *sampled.tokens[0]]
    expected = trained.trainer_scores('first', ids)[len(prompt) - 1 :]
    np.testing.assert_allclose(sampled_logprobs(sampled), expected, rtol=0, atol=TOLERANCE)
