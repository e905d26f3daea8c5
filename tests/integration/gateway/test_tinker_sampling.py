"""Tests that the real Tinker SDK samples through a gateway from a sampler service with a tiny model."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from fixtures.gateway_upstream import Upstream
from fixtures.running_gateway import ADMIN_KEY, running_gateway
from fixtures.sampler_engines import make_torch_engine
from fixtures.sampler_service import FakeWeightSource, serving_sampler
from fixtures.tinker_sdk import collect_connections
from fixtures.tiny_oracle import TinyOracle

pytestmark = [
    pytest.mark.timeout(120),
    # The SDK leaves connections open when a process ends, as its documentation states.
    pytest.mark.filterwarnings('ignore::ResourceWarning'),
]
PROMPT = [1, 40, 41, 42]


@dataclass
class TinkerApi:
    """The address of a running Tinker API."""

    url: str

    def client(self) -> tinker.ServiceClient:
        """Return the SDK's client. It blocks, so create and use it in a thread."""
        return tinker.ServiceClient(base_url=self.url, api_key=ADMIN_KEY)


@pytest.fixture
async def api(tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinkerApi]:
    """A gateway, and a sampler on the torch engine with a tiny model."""
    monkeypatch.setenv('TINKER_TELEMETRY', '0')
    engine = make_torch_engine(tiny_llama_dir, max_sequences=64, max_batch_tokens=512)
    upstream = Upstream()
    (tmp_path / 'sampler').mkdir()
    async with (
        upstream.serving(),
        serving_sampler(engine, FakeWeightSource(), tmp_path / 'sampler', queue_length=512) as sampler,
        running_gateway(
            tmp_path, upstream=upstream.address, sampler=sampler.address, http_listen='127.0.0.1:0'
        ) as gateway,
    ):
        url = f'http://{gateway.http_address}'
        async with httpx.AsyncClient(headers={'x-api-key': ADMIN_KEY}) as client:
            while True:
                response = (await client.get(f'{url}/api/v1/get_server_capabilities')).json()
                if any(model['sampleable'] for model in response['supported_models']):
                    break
                await asyncio.sleep(0)
        yield TinkerApi(url)
    await asyncio.to_thread(collect_connections)


def sample(client: tinker.SamplingClient, *, num_samples: int = 1, **fields: Any) -> types.SampleResponse:
    """Return the SDK's response to a request."""
    names = ('max_tokens', 'seed', 'stop', 'temperature', 'top_k')
    given: dict[str, Any] = {name: fields.pop(name) for name in names if name in fields}
    prompt = types.ModelInput.from_ints(fields.pop('tokens', PROMPT))
    params = types.SamplingParams(**given)
    return client.sample(prompt=prompt, num_samples=num_samples, sampling_params=params, **fields).result()


async def test_sdk_samples_with_seeds_stops_and_scores(api: TinkerApi) -> None:
    """Equal seeds give equal sequences, stop tokens apply, and scores have the requested shapes."""

    def run() -> None:
        with api.client() as service:
            client = service.create_sampling_client(base_model='tiny').result()
            first = sample(client, num_samples=2, max_tokens=12, seed=7, stop=[])
            repeated = sample(client, num_samples=2, max_tokens=12, seed=7, stop=[])
            tokens = [sequence.tokens for sequence in first.sequences]
            assert tokens == [sequence.tokens for sequence in repeated.sequences]
            assert tokens[0] != tokens[1]
            assert [len(item) for item in tokens] == [12, 12]
            assert {sequence.stop_reason for sequence in first.sequences} == {'length'}
            assert len({sequence.sequence_id for sequence in first.sequences}) == 2

            stopped = sample(client, max_tokens=12, seed=7, stop=[tokens[0][3]]).sequences[0]
            end = tokens[0].index(tokens[0][3]) + 1
            assert (stopped.tokens, stopped.stop_reason) == (tokens[0][:end], 'stop')

            greedy = [sample(client, max_tokens=6, temperature=0).sequences[0].tokens for _ in range(2)]
            assert greedy[0] == greedy[1] == sample(client, max_tokens=6, top_k=1).sequences[0].tokens

            scored = sample(
                client,
                max_tokens=2,
                stop=[],
                include_prompt_logprobs=True,
                topk_prompt_logprobs=3,
                topk_sample_logprobs=2,
                prompt_logprobs_last_n=2,
            )
            assert scored.prompt_logprobs is not None
            assert scored.topk_prompt_logprobs is not None
            assert [value is None for value in scored.prompt_logprobs] == [True, True, False, False]
            assert [None if row is None else len(row) for row in scored.topk_prompt_logprobs] == [None, None, 3, 3]
            alternatives = scored.sequences[0].topk_logprobs_np
            assert alternatives is not None
            assert alternatives.logprobs.shape == (2, 2)

    await asyncio.to_thread(run)


async def test_sdk_scores_as_the_model_does(api: TinkerApi, tiny_llama_dir: Path) -> None:
    """`compute_logprobs` returns the log-probabilities of a plain forward pass, regardless of sampling parameters."""

    def run() -> tuple[list[float | None], types.SampledSequence]:
        with api.client() as service:
            client = service.create_sampling_client(base_model='tiny').result()
            hot = sample(client, max_tokens=5, temperature=2.0, seed=3, stop=[]).sequences[0]
            return client.compute_logprobs(types.ModelInput.from_ints(PROMPT + hot.tokens)).result(), hot

    scores, hot = await asyncio.to_thread(run)
    expected = TinyOracle(tiny_llama_dir).score(PROMPT + hot.tokens)
    assert scores[0] is None
    np.testing.assert_allclose(np.array(scores[1:], 'f4'), expected, atol=1e-4)
    np.testing.assert_allclose(np.array(hot.logprobs, 'f4'), expected[-5:], atol=1e-4)


async def test_sdk_scores_chosen_and_drawn_tokens(api: TinkerApi, tiny_llama_dir: Path) -> None:
    """Target tokens and drawn alternatives have the log-probabilities of a plain forward pass, in the sent layout."""
    tokens = [*PROMPT, 50, 51, 52, 53, 54, 55]
    targets = torch.full((len(tokens) - 1, 3), -1)
    targets[-1] = torch.tensor([7, 250, 7])
    targets[4, 1] = 99
    layouts = (types.TensorData.from_torch(targets), types.TensorData.from_torch_sparse(targets, pad_value=-1))

    def run() -> list[types.SampleResponse]:
        with api.client() as service:
            client = service.create_sampling_client(base_model='tiny').result()
            given = {'tokens': tokens, 'max_tokens': 1, 'seed': 3, 'prompt_alt_tokens_k': 4}
            with pytest.raises(tinker.BadRequestError, match='target_prompt_logprobs'):
                sample(client, **{**given, 'target_prompt_logprobs': types.TensorData.from_torch(targets[1:])})
            with pytest.raises(tinker.BadRequestError, match='target_prompt_logprobs'):
                sample(client, **{**given, 'target_prompt_logprobs': types.TensorData.from_torch(targets + 10_000)})
            return [sample(client, target_prompt_logprobs=layout, **given) for layout in layouts]

    responses = await asyncio.to_thread(run)
    logprobs = TinyOracle(tiny_llama_dir).distributions(tokens)
    expected = np.where(targets < 0, 0, np.take_along_axis(logprobs, targets.clip(0).numpy(), 1))
    for response, layout in zip(responses, layouts, strict=True):
        scores, drawn = response.target_prompt_logprobs, response.prompt_alt_tokens
        assert scores is not None
        assert drawn is not None
        assert (scores.shape, scores.sparse_col_indices) == (layout.shape, layout.sparse_col_indices)
        np.testing.assert_allclose(scores.to_torch(), expected, rtol=0, atol=1e-5)
        assert drawn.tokens.shape == drawn.logprobs.shape == [len(tokens) - 1, 4]
        drawn_expected = np.take_along_axis(logprobs, drawn.tokens.to_numpy(), 1)
        np.testing.assert_allclose(drawn.logprobs.to_numpy(), drawn_expected, rtol=0, atol=1e-5)


async def test_copies_of_a_client_sample_independently(api: TinkerApi) -> None:
    """Pickled copies of a client return the original's samples for the same seed, even in another process."""

    def run() -> None:
        with api.client() as service:
            client = service.create_sampling_client(base_model='tiny').result()
            expected = sample(client, max_tokens=4, seed=1).sequences[0].tokens
            data = pickle.dumps(client)
            copies = [pickle.loads(data) for _ in range(2)]
            for copy in copies:
                assert sample(copy, max_tokens=4, seed=1).sequences[0].tokens == expected
            # CPython 3.11 may abort at exit while threads of the SDK run. The test only needs the result, so the
            # process exits immediately after it.
            code = (
                'import os, pickle, sys; from tinker import types; client = pickle.load(sys.stdin.buffer);'
                f'prompt = types.ModelInput.from_ints({PROMPT});'
                'params = types.SamplingParams(max_tokens=4, seed=1);'
                'print(client.sample(prompt, 1, params).result().sequences[0].tokens, flush=True);'
                'os._exit(0)'
            )
            done = subprocess.run(
                [sys.executable, '-c', code], input=data, capture_output=True, check=False, timeout=60
            )
            assert done.returncode == 0, done.stderr.decode()
            assert done.stdout.decode().strip() == str(expected)
            copies.clear()

    await asyncio.to_thread(run)


@pytest.mark.slow
async def test_many_concurrent_samples_all_finish(api: TinkerApi) -> None:
    """128 concurrent requests of one client each get a complete response."""

    async def run() -> list[types.SampleResponse]:
        with api.client() as service:
            client = await service.create_sampling_client(base_model='tiny')
            params = types.SamplingParams(max_tokens=4, seed=5, stop=[])
            prompts = [types.ModelInput.from_ints([*PROMPT, 3 + number]) for number in range(128)]
            return list(await asyncio.gather(*(client.sample(prompt, 1, params) for prompt in prompts)))

    responses = await asyncio.to_thread(asyncio.run, run())
    assert [len(response.sequences[0].tokens) for response in responses] == [4] * 128


async def test_unsuitable_requests_are_user_errors(api: TinkerApi) -> None:
    """Too many tokens, an unknown token, an unknown base model and weights saved for training are user errors."""

    def run() -> None:
        with api.client() as service:
            client = service.create_sampling_client(base_model='tiny').result()
            with pytest.raises(tinker.BadRequestError):
                sample(client, max_tokens=1 << 20)
            with pytest.raises(tinker.BadRequestError):
                sample(client, tokens=[1 << 30], max_tokens=1)
            with pytest.raises(tinker.BadRequestError):
                service.create_sampling_client(base_model='huge').result()
            with pytest.raises(tinker.BadRequestError):
                service.create_sampling_client(model_path='tinker://run/weights/final').result()

    await asyncio.to_thread(run)


async def test_client_of_an_older_sdk_reads_json(api: TinkerApi) -> None:
    """SDK 0.16.1 in a separate process samples and scores."""
    code = (
        'import os, tinker; from tinker import types;'
        f'client = tinker.ServiceClient(base_url={api.url!r}, api_key={ADMIN_KEY!r})'
        ".create_sampling_client(base_model='tiny');"
        f'prompt = types.ModelInput.from_ints({PROMPT});'
        'params = types.SamplingParams(max_tokens=4, seed=1);'
        'response = client.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result();'
        'assert [len(s.tokens) == len(s.logprobs) for s in response.sequences] == [True, True];'
        'print(response.prompt_logprobs, response.topk_prompt_logprobs, flush=True);'
        # CPython 3.11 may abort at exit while threads of the SDK run, so the process exits immediately after the
        # result.
        'os._exit(0)'
    )
    sdk = Path(sys.prefix) / 'tinker-sdks' / '0.16.1'
    environment = {'PYTHONPATH': str(sdk), 'TINKER_TELEMETRY': '0', 'PATH': '/usr/bin:/bin'}
    process = await asyncio.create_subprocess_exec(
        sys.executable, '-c', code, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, error = await process.communicate()
    assert process.returncode == 0, error.decode()
    assert out.decode().startswith('[None, -')
