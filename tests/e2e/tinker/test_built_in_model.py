"""The built-in model is served under its hub id, and every API also accepts its alias."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from fixtures.tinker_sdk import SDK_MARKS, rest_client, running_stack, service_client
from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.timeout(300), *SDK_MARKS, pytest.mark.slow]

ALIAS, HUB_ID = 'smollm2-135m-instruct', 'HuggingFaceTB/SmolLM2-135M-Instruct'


@pytest.fixture(scope='module')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """A stack that was started with the alias; a tiny model replaces the built-in model."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv('TWINKLE_MODEL_ID_ALIASES', f'{HUB_ID}={model}')
        with running_stack(tmp_path_factory.mktemp('stack'), ALIAS) as state:
            yield state


def openai(stack: StackState, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the response of a route of the OpenAI API."""
    headers = {'authorization': f'Bearer {stack.read_api_key()}', 'content-type': 'application/json'}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f'{stack.http_url}/v1{path}', data, headers)) as response:
        return json.load(response)


def test_tinker_clients_get_the_hub_id(stack: StackState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was requested by alias reports the hub id; it and its samplers load the tokenizer by this id."""
    folder = tmp_path / HUB_ID
    folder.parent.mkdir()
    folder.symlink_to(build_tiny_model(tmp_path / 'model', family='qwen3'))
    monkeypatch.chdir(tmp_path)
    with rest_client(stack) as rest:
        served = rest.get_server_capabilities().result().supported_models
        assert [item.model_name for item in served] == [HUB_ID]
    with service_client(stack) as client:
        model = client.create_lora_training_client(base_model=ALIAS, rank=8).result()
        facts = model.get_info().model_data
        assert (facts.model_name, facts.tokenizer_id) == (HUB_ID, HUB_ID)
        # The SDK loads a base model's tokenizer by the name that the program gives, so this name must be the hub id.
        sampler = client.create_sampling_client(base_model=HUB_ID).result()
        trained = model.save_weights_and_get_sampling_client().result()
        for tokenizer in (model.get_tokenizer(), sampler.get_tokenizer(), trained.get_tokenizer()):
            prompt = tinker.ModelInput.from_ints(tokenizer.encode('Twinkle'))
        response = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=2)).result()
        assert len(response.sequences[0].tokens) <= 2


def test_other_apis_accept_both_names(stack: StackState) -> None:
    """Training, sampling and completions work with the alias and the hub id; listings name the hub id."""
    assert stack.base_model == HUB_ID
    assert openai(stack, '/models')['data'][0]['id'] == HUB_ID
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        for name in (ALIAS, HUB_ID):
            model = MultiLoraTransformersModel(name, client=client)
            model.add_adapter_to_model(f'of-{len(name)}', LoraConfig(r=4))
            Sampler(name, client=client).sample({'messages': [{'role': 'user', 'content': 'Hi'}]}, {'max_tokens': 2})
            answer = openai(stack, '/completions', {'model': name, 'prompt': 'x', 'max_tokens': 1})
            assert answer['usage']['completion_tokens'] == 1
        assert {run.base_model for run in client.list_training_runs()} == {HUB_ID}
