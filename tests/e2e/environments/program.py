"""Trains on the environments of another library, in process and over the services, and prints the results as JSON.

The test runs it in a separate process, because only this process has the packages of that library on its path.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from fixtures.chat_templates import HERMES
from fixtures.env_contract import check_env
from fixtures.faulty_service import free_port
from fixtures.scripted_sampler import ScriptedSampler
from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import LoraConfig, SamplingParams, Trajectory, pack_value
from twinkle.model import TransformersModel
from twinkle.rollout import (
    EnvFactory,
    EnvStep,
    MultiTurnRollout,
    Rollout,
    VerifiersEnvs,
    load_tasks,
    load_verifiers,
    openenv_envs,
    task_chats,
    task_envs,
)
from twinkle.sampler import TorchSampler
from twinkle.template import Template
from twinkle_client import TwinkleClient
from twinkle_client.checkpoint_engine import CheckpointEngineManager as RemoteManager
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

STEPS, SAMPLES = 12, 8
CALL = 'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Address:
    """Address and key of the services, and the name and folder of their model."""

    def __init__(self, folder: str, address: str, api_key: str, base_model: str) -> None:
        self.folder, self.address, self.api_key, self.base_model = folder, address, api_key, base_model


def learn(model: Any, rollout: MultiTurnRollout, chats: list[Trajectory], sync: Callable[[], object]) -> list[float]:
    """Train with GRPO on the environments of a rollout, and return the mean reward of each step."""
    model.add_adapter_to_model('default', LoraConfig(r=8, lora_alpha=16, seed=1))
    model.set_optimizer('AdamW', lr=1e-2)
    model.set_loss('GRPOLoss', epsilon=0.2)
    means: list[float] = []
    for step in range(STEPS):
        sync()
        samples = rollout(chats, num_samples=SAMPLES, seed=step)
        rewards = [sample.reward for sample in samples]
        advantages = GRPOAdvantage()(rewards, num_generations=SAMPLES, scale='group').tolist()
        model.forward_backward([sample.feature for sample in samples], advantages=advantages)
        model.clip_grad_and_step()
        means.append(sum(rewards) / len(rewards))
    return means


def in_process(envs: EnvFactory, chats: list[Trajectory], services: Address) -> list[float]:
    """Train with the model and the sampler in this process."""
    sampler, model = TorchSampler(services.folder), TransformersModel(services.folder)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    rollout = MultiTurnRollout(sampler, env=envs, sampling_params=SamplingParams(max_tokens=12))
    return learn(model, rollout, chats, partial(manager.sync_weights, merge_and_sync=False))


def over_services(envs: EnvFactory, chats: list[Trajectory], services: Address) -> list[float]:
    """Train and sample on the services; the environments run in this process."""
    with TwinkleClient(services.address, services.api_key) as client:
        sampler = Sampler(services.base_model, client=client)
        model = MultiLoraTransformersModel(services.base_model, client=client)
        manager = RemoteManager(model, sampler)
        params = SamplingParams(max_tokens=12)
        rollout = MultiTurnRollout(sampler, Template(services.folder), sampling_params=params, env=envs)
        return learn(model, rollout, chats, partial(manager.sync_weights, merge_and_sync=False))


def tool_template(folder: Path) -> Template:
    """Return a template with tools for the tokenizer of the model."""
    build_tiny_tokenizer(folder)
    (folder / 'chat_template.jinja').write_text(HERMES)
    return Template(str(folder), max_length=100_000)


def chat_of(envs: EnvFactory, chat: Trajectory, template: Template, *turns: str) -> dict[str, Any]:
    """Return a chat with the given turns of the model; the last turn repeats."""
    said = [*turns]
    sampler = ScriptedSampler(template, lambda *_: said.pop(0) if len(said) > 1 else said[0])
    (rollout,) = MultiTurnRollout(sampler, env=envs, max_turns=4)(chat, seed=1)
    return shown(rollout)


def run_document(library: str, services: Address, **names: str) -> list[dict[str, Any]]:
    """Run the program about a library in docs/rollouts.md, and return the parts of its rollouts."""
    text = (ROOT / 'docs' / 'rollouts.md').read_text()
    program = text.partition(f'```python title="{library}"\n')[2].partition('```')[0]
    values: dict[str, Any] = {'MultiTurnRollout': MultiTurnRollout, 'sampler': TorchSampler(services.folder), **names}
    exec(compile(program, 'docs/rollouts.md', 'exec'), values)
    return [shown(rollout) for rollout in values['rollouts']]


def shown(rollout: Rollout) -> dict[str, Any]:
    """Return the parts of a rollout that the test compares."""
    messages = [f'{message["role"]}: {message["content"]}' for message in rollout.messages]
    return {'messages': messages, 'reward': rollout.reward, 'facts': rollout.facts, 'end': rollout.end_reason}


def shown_steps(steps: list[EnvStep]) -> list[list[float]]:
    """Return the reward and the number of messages of each step."""
    return [[step.reward, len(step.messages)] for step in steps]


def use_verifiers(services: Address) -> dict[str, Any]:
    """Run and train on a taskset, and call a tool of its harness."""
    template = tool_template(Path(services.folder) / 'tools')
    runtime: dict[str, Any] = {'type': 'subprocess'}
    results: dict[str, Any] = {}
    single = load_verifiers('letter_tasks', agent={'runtime': runtime, 'harness': {'id': 'letter_tasks'}})
    with VerifiersEnvs(single) as envs:
        chats = list(envs.chats())
        results['contract'] = shown_steps(check_env(envs, chats[0], answer='ab12'))
        results['in process'] = in_process(envs, chats, services)
        results['over services'] = over_services(envs, chats, services)
    results['document'] = run_document('verifiers', services, TASKSET='letter_tasks')
    harness = {'id': 'letter_tasks', 'user_turns': 1, 'has_tool': True}
    calling = load_verifiers('letter_tasks', agent={'runtime': runtime, 'harness': harness})
    with VerifiersEnvs(calling, template=template) as envs:
        results['tools'] = chat_of(envs, next(envs.chats()), template, CALL, 'ab', 'cd12')
        results['refused'] = chat_of(envs, next(envs.chats()), template, CALL)
    return results


@contextmanager
def served() -> Iterator[str]:
    """Serve the environment of OpenEnv over HTTP and WebSockets."""
    from letter_servers import LetterServer, TextAction, TextObservation  # noqa: PLC0415 - not with verifiers' packages
    from openenv.core.env_server import create_fastapi_app  # noqa: PLC0415

    port = free_port()
    app = create_fastapi_app(LetterServer, TextAction, TextObservation, max_concurrent_envs=64)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level='warning', lifespan='off'))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(timeout=0.05)
    yield f'http://127.0.0.1:{port}'
    server.should_exit = True
    thread.join()


def use_openenv(services: Address) -> dict[str, Any]:
    """Run and train on an environment in this process, and on the same environment behind its server."""
    from letter_servers import LetterServer, TextAction  # noqa: PLC0415

    chats: list[Trajectory] = [{'messages': [{'role': 'system', 'content': 'Act.'}]}]
    twice: Trajectory = {**chats[0], 'user_data': [pack_value('openenv_reset', {'action_count': 2})]}
    results: dict[str, Any] = {}
    local = openenv_envs(
        LetterServer, observe=lambda observation: observation.text, act=lambda text: TextAction(text=text)
    )
    results['contract'] = shown_steps(check_env(local, twice, answer='ab12'))
    results['in process'] = in_process(local, chats, services)
    with served() as url:
        remote = openenv_envs(url, observe=lambda observation: observation['text'], act=lambda text: {'text': text})
        results['served contract'] = shown_steps(check_env(remote, twice, answer='ab12'))
        results['document'] = run_document('openenv', services, URL=url)
        results['chat'] = chat_of(remote, twice, Template(services.folder), 'ab12')
        results['over services'] = over_services(remote, chats, services)
    return results


def use_reasoning_gym(services: Address) -> dict[str, Any]:
    """Score a right and a wrong answer of a task."""
    del services
    tasks = load_tasks('leg_counting', size=2, seed=7)
    chats = list(task_chats(tasks))
    answers = (tasks[0]['answer'], 'many')
    steps = [check_env(task_envs(tasks), chats[0], answer=f'<answer>{answer}</answer>') for answer in answers]
    return {'contract': [shown_steps(item) for item in steps]}


def main(library: str, *services: str) -> None:
    """Use the environments of a library, and print the results."""
    uses = {'verifiers': use_verifiers, 'openenv': use_openenv, 'reasoning-gym': use_reasoning_gym}
    sys.stdout.write(json.dumps(uses[library](Address(*services))) + '\n')


if __name__ == '__main__':
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
