"""The five services with the small real model: equal log-probabilities, peft folders, traces and tenants."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fixtures.peft_oracle import label_logprobs
from twinkle.data_format import IGNORE_INDEX, LoraConfig
from twinkle.hub import resolve_model
from twinkle.telemetry import SpanRecord, read_spans
from twinkle_client import NotFoundError, TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack
from twinkle_client.tracing import tracing_to

pytestmark = pytest.mark.timeout(300)

MODEL = 'smollm2-135m-instruct'
TOLERANCE = 1e-4
"""Maximum difference between two computations of a log-probability in float32."""


@pytest.fixture(scope='module')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Running stack with the small real model."""
    services = {'checkpoint': {'are_folders_shown': True}}
    options = StackOptions(state_dir=tmp_path_factory.mktemp('stack'), dtype='float32', services=services)
    state = start_stack(options, report=lambda *_: None)
    try:
        yield state
    finally:
        stop_stack(state.state_dir, report=lambda *_: None)


@pytest.fixture
def client(stack: StackState) -> Iterator[TwinkleClient]:
    """Client with the stack's administrator key."""
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        yield client


def _feature(seed: int, length: int = 48) -> dict[str, Any]:
    ids = np.random.default_rng(seed).integers(3, 40_000, length).astype(np.int32)
    labels = np.append(ids[1:], IGNORE_INDEX).astype(np.int32)
    labels[: length // 2] = IGNORE_INDEX
    return {'input_ids': ids, 'labels': labels}


def _trained_model(client: TwinkleClient, name: str, *, steps: int = 2) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(MODEL, client=client)
    model.add_adapter_to_model(name, LoraConfig(r=8, lora_alpha=32, seed=1))
    model.set_optimizer('AdamW', lr=5e-3)
    for step in range(steps):
        model.forward_backward([_feature(step)])
        model.clip_grad_and_step()
    return model


def test_trainer_and_sampler_agree_on_logprobs(client: TwinkleClient) -> None:
    """Trainer and sampler give nearly equal log-probabilities for the same tokens and version."""
    model = _trained_model(client, 'agree')
    version = model.publish_version()
    feature = _feature(7)
    trainer = np.asarray(model.forward_only([feature])['logps'][0])
    sampler = Sampler(MODEL, client=client).compute_logprobs([feature['input_ids']], 'agree', version=version)[0]
    counted = np.flatnonzero(feature['labels'] != IGNORE_INDEX)
    assert np.abs(trainer[counted] - sampler[counted + 1]).max() <= TOLERANCE
    base = Sampler(MODEL, client=client).compute_logprobs([feature['input_ids']])[0]
    assert np.abs(base[counted + 1] - sampler[counted + 1]).max() > 100 * TOLERANCE


def test_saved_folder_gives_the_same_logprobs_in_plain_peft(client: TwinkleClient) -> None:
    """Plain peft computes nearly the same log-probabilities from the saved folder."""
    model = _trained_model(client, 'saved')
    checkpoint = client.get_checkpoint(model.save('for-peft'))
    feature = _feature(8)
    ours = np.asarray(model.forward_only([feature])['logps'][0])
    base = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype='float32')
    plain = PeftModel.from_pretrained(base, checkpoint.folder)
    theirs = label_logprobs(plain, feature['input_ids'].tolist(), feature['labels'].tolist()).detach().numpy()
    assert np.abs(ours - theirs).max() <= TOLERANCE


def test_resumed_training_continues_from_the_saved_state(client: TwinkleClient) -> None:
    """A resumed run has the saved run's weights, optimizer and counters, so its next step has the same loss."""
    model = _trained_model(client, 'first')
    path = model.save('halfway', save_optimizer=True)
    resumed = MultiLoraTransformersModel(MODEL, client=client)
    resumed.add_adapter_to_model('resumed', LoraConfig(r=8, lora_alpha=32, seed=2))
    resumed.set_optimizer('AdamW', lr=5e-3)
    resumed.resume_from_checkpoint(path)
    losses = []
    for run in (model, resumed):
        run.forward_backward([_feature(11)])
        run.clip_grad_and_step()
        losses.append(run.forward_only([_feature(12)])['loss'])
    assert losses[0] == losses[1]


def test_one_trace_links_the_spans_of_all_services(stack: StackState, client: TwinkleClient) -> None:
    """Spans of client, gateway, model, checkpoint and sampler form one tree."""
    with tracing_to(stack.state_dir / 'traces'):
        tracer = trace.get_tracer('test')
        with tracer.start_as_current_span('a training step') as root:
            model = _trained_model(client, 'traced', steps=1)
            version = model.publish_version()
            Sampler(MODEL, client=client).sample('Hello', {'max_tokens': 2}, 'traced', version=version)
        trace_id = f'{root.get_span_context().trace_id:032x}'
    spans = _wait_for_spans(stack, trace_id)
    by_id = {span.span_id: span for span in spans}
    assert {span.service for span in spans} >= {'client', 'gateway', 'model', 'checkpoint', 'sampler'}
    assert [span.name for span in spans if span.parent_id not in by_id] == ['a training step']
    edges = {(by_id[span.parent_id].service, span.service) for span in spans if span.parent_id in by_id}
    # The sampler receives versions over a subscription that outlives the request and therefore has its own trace.
    assert edges >= {('client', 'gateway'), ('gateway', 'model'), ('gateway', 'sampler'), ('model', 'checkpoint')}


def _wait_for_spans(stack: StackState, trace_id: str) -> list[SpanRecord]:
    """Return the spans of a trace after every service has written its spans."""
    services = {'client', 'gateway', 'model', 'checkpoint', 'sampler'}
    spans: list[SpanRecord] = []
    for _ in itertools.repeat(None, 2000):
        spans = list(read_spans(stack.state_dir / 'traces', trace_id=trace_id))
        ids = {span.span_id for span in spans}
        orphans = [span for span in spans if span.parent_id and span.parent_id not in ids]
        if services <= {span.service for span in spans} and not orphans:
            break
        trace.get_tracer_provider().force_flush(10)  # type: ignore[attr-defined]
    return spans


def test_resources_are_hidden_from_other_tenants(stack: StackState, client: TwinkleClient) -> None:
    """Another tenant cannot see a tenant's adapters, checkpoints and runs."""
    model = _trained_model(client, 'private', steps=0)
    adapter_id = model.adapter_id('private')
    path = model.save('private')
    model.publish_version()
    _, secret = KeyAdministration(client=client).create_key('intruder', scopes=['train', 'sample', 'data'])
    with TwinkleClient(stack.address, secret) as intruder:
        theirs = MultiLoraTransformersModel(MODEL, client=intruder)
        sampler = Sampler(MODEL, client=intruder)
        attempts = [
            lambda: theirs.attach_adapter('x', adapter_id),
            lambda: theirs.add_adapter_to_model('y', path),
            lambda: intruder.get_checkpoint(path),
            lambda: intruder.delete_checkpoint(path),
            lambda: intruder.get_training_run(adapter_id),
            lambda: sampler.sample('Hello', {'max_tokens': 1}, adapter_uri=path),
        ]
        for attempt in attempts:
            with pytest.raises(NotFoundError):
                attempt()
        assert not intruder.list_training_runs()
        assert not intruder.list_checkpoints()
    assert client.get_checkpoint(path).path == path


def test_greedy_answer_of_the_base_model_is_repeatable(client: TwinkleClient) -> None:
    """The base model gives the same correct answer twice with greedy sampling."""
    question = {'messages': [{'role': 'user', 'content': 'What is the capital of France?'}]}
    sampler = Sampler(MODEL, client=client)
    answers = {sampler.sample(question, {'max_tokens': 16, 'temperature': 0.0}).sequences[0].decoded for _ in range(2)}
    assert len(answers) == 1
    assert 'Paris' in answers.pop()


def test_download_equals_the_saved_folder(client: TwinkleClient, tmp_path: Path) -> None:
    """A downloaded archive contains the files on the service's disk."""
    model = _trained_model(client, 'downloaded', steps=1)
    path = model.save('down')
    folder = client.download_checkpoint(path, tmp_path / 'down')
    stored = Path(client.get_checkpoint(path).folder)
    for name in ('adapter_model.safetensors', 'adapter_config.json'):
        assert (folder / name).read_bytes() == (stored / name).read_bytes()
