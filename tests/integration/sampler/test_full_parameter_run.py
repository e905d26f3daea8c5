"""A sampler that serves one full-parameter run from a real checkpoint service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import duration_pb2
from transformers import AutoModelForCausalLM

from fixtures.checkpoint_service import ALICE as ALICE_SERVICE
from fixtures.checkpoint_service import failure_of
from fixtures.published import Published, serving_both
from fixtures.sampled import lora_state
from fixtures.sampler_service import PROMPT, Answer, ints, numbers, read_answer, sample_request, tenant
from fixtures.whole_models import whole_state
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.sampler import TorchSampler
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.sampler.domain.adapter import AdapterChoice

# The first test's timeout on vLLM includes the start of the engine, which may take minutes.
pytestmark = [pytest.mark.asyncio(loop_scope='session'), pytest.mark.timeout(300)]

ALICE, BOB = tenant('alice'), tenant('bob')
FACTORS = {1: 1.25, 2: 0.75, 3: 1.1}
"""Factor by which each version multiplies the model's weights."""


@asynccontextmanager
async def following(engine, folder: Path) -> AsyncIterator[Published]:
    """Serve a checkpoint service, and a sampler that follows Alice's run 'full'."""
    async with serving_both(engine, folder, follow_run='full', follow_tenant='alice') as both:
        both.sampler.versions.start()
        yield both


async def publish(both: Published, model: Path, version: int) -> None:
    with acting_for(ALICE_SERVICE):
        state = whole_state(model, factor=FACTORS[version])
        await both.checkpoint.weights.publish_version('full', state, version=version)


def run_ref(seconds: float = 20, **fields: int) -> sampling_pb2.AdapterRef:
    """Return a reference to the run."""
    wait = duration_pb2.Duration()
    wait.FromTimedelta(timedelta(seconds=seconds))
    return sampling_pb2.AdapterRef(adapter_id='full', wait_timeout=wait, **fields)


async def answer_of(both: Published, **fields: int) -> Answer:
    """Return a greedy response of six tokens."""
    request = sample_request(run_ref(**fields), params={'temperature': 0.0})
    return await read_answer(both.sampler.stub.Sample(request, metadata=ALICE))


async def scores(both: Published, version: int, tokens: list[int]) -> list[float]:
    """Return the log-probabilities of the tokens after the prompt, under exactly one version."""
    request = wire.ComputeLogprobsRequest(base_model='tiny', adapter=run_ref(exact=version), token_ids=[ints(tokens)])
    answer = await both.sampler.stub.ComputeLogprobs(request, metadata=ALICE)
    return numbers(answer.sequences[0].logprobs)[len(PROMPT) :]


async def refusal(both: Published, ref: sampling_pb2.AdapterRef | None, caller=ALICE) -> str:
    """Return the reason with which a request is refused."""
    return (await failure_of(both.sampler.stub.Sample(sample_request(ref), metadata=caller))).reason


def expected_scores(model: Path, version: int, tokens: list[int]) -> list[float]:
    """Return the library sampler's log-probabilities of the tokens after the prompt."""
    sampler = TorchSampler(str(model))
    sampler.receive_weights(whole_state(model, factor=FACTORS[version]))
    (scored,) = sampler.sample([*PROMPT, *tokens], {'max_tokens': 0})
    return [float(np.float32(value)) for value in scored.prompt_logprobs[len(PROMPT) :]]


def greedy(model: Path, version: int) -> list[int]:
    """Return the tokens that transformers samples with the weights of a version."""
    oracle = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.mul_(torch.tensor(FACTORS[version], dtype=torch.float32))
        ids = oracle.generate(torch.tensor([PROMPT]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    return ids[0, len(PROMPT) :].tolist()


async def test_each_version_samples_with_its_weights(real_engine, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Tokens equal those of transformers with the published weights; scores of the torch engine are bitwise equal."""
    async with following(real_engine, tmp_path) as both:
        assert await refusal(both, run_ref(0.05)) == 'VERSION_NOT_READY'
        for version in (1, 2):
            await publish(both, tiny_llama_dir, version)
            answer = await answer_of(both, at_least=version)
            assert answer.spans == [[(version, 0, 6)]]
            assert answer.tokens[0] == greedy(tiny_llama_dir, version)
            expected = expected_scores(tiny_llama_dir, version, answer.tokens[0])
            if real_engine.facts.engine == 'torch':
                assert await scores(both, version, [*PROMPT, *answer.tokens[0]]) == expected
            assert answer.logprobs[0] == pytest.approx(expected, abs=1e-4)
        assert (await answer_of(both)).spans == [[(2, 0, 6)]]
        assert (await answer_of(both, exact=2)).spans == [[(2, 0, 6)]]
        assert await refusal(both, run_ref(exact=1)) == 'VERSION_NOT_FOUND'
        assert await refusal(both, run_ref(0.05, exact=3)) == 'VERSION_NOT_READY'


async def test_other_requests_are_refused(torch_engine, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The base model, other adapters and other tenants are refused, and the run continues to be served."""
    async with following(torch_engine, tmp_path) as both:
        await publish(both, tiny_llama_dir, 1)
        await both.publish(1, adapter_id='ad-1')
        before = await answer_of(both)
        other = sampling_pb2.AdapterRef(adapter_id='ad-1')
        assert await refusal(both, None) == 'BASE_MODEL_NOT_FOUND'
        assert await refusal(both, other) == 'NOT_SUPPORTED_HERE'
        assert await refusal(both, None, BOB) == 'BASE_MODEL_NOT_FOUND'
        assert await refusal(both, run_ref(), BOB) == 'ADAPTER_NOT_FOUND'
        unload = both.sampler.stub.UnloadAdapter(wire.UnloadAdapterRequest(adapter_id='full'), metadata=ALICE)
        assert (await failure_of(unload)).reason == 'NOT_SUPPORTED_HERE'
        listed = await both.sampler.stub.ListResidentAdapters(wire.ListResidentAdaptersRequest(), metadata=BOB)
        assert not listed.adapters
        assert await answer_of(both) == before


async def test_running_request_keeps_its_weights(real_engine, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The weights are not replaced while a request uses them; a request for the new version waits."""
    async with following(real_engine, tmp_path) as both:
        await publish(both, tiny_llama_dir, 1)
        request = sample_request(run_ref(), params={'temperature': 0.0, 'max_tokens': 64})
        alone = await read_answer(both.sampler.stub.Sample(request, metadata=ALICE))
        versions = both.sampler.versions
        choice = AdapterChoice(adapter_id='full', at_least=2, wait=timedelta(seconds=20))
        async with versions.lease(ALICE_SERVICE, AdapterChoice(adapter_id='full')) as leased:
            await publish(both, tiny_llama_dir, 2)
            running = asyncio.create_task(anext(yield_leased_version(versions, choice)))
            assert leased.key.version == 1
            assert versions.all_resident() == [leased]
        assert await running == 2
        after = await answer_of(both, at_least=2)
        assert after.spans == [[(2, 0, 6)]]
        assert alone.spans == [[(1, 0, 64)]]


async def yield_leased_version(versions, choice: AdapterChoice):
    """Yield the number of the selected version, and keep the version in use until the generator ends."""
    async with versions.lease(ALICE_SERVICE, choice) as version:
        yield version.key.version


async def test_adapter_version_of_a_full_run_is_refused(torch_engine, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A LoRA version of the run is refused; the old version is served until the next full-parameter version."""
    async with following(torch_engine, tmp_path) as both:
        await publish(both, tiny_llama_dir, 1)
        before = await answer_of(both)
        with acting_for(ALICE_SERVICE):
            await both.checkpoint.weights.publish_version('full', lora_state(2), version=2)
        assert await refusal(both, run_ref(at_least=2)) == 'ADAPTER_NOT_READY'
        assert await answer_of(both) == before
        await publish(both, tiny_llama_dir, 3)
        assert (await answer_of(both, at_least=3)).spans == [[(3, 0, 6)]]
