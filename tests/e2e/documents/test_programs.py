"""Python programs of the documents for new users that need a running stack, on a tiny model."""

from collections.abc import Callable, Mapping

import pytest

from fixtures.documented import DOCUMENTED_MODEL, Checkout, blocks, blocks_of, program_of, replaced
from fixtures.source_tree import ROOT
from twinkle_client import TwinkleClient
from twinkle_client.rollouts import RunRollouts
from twinkle_client.stack import StackState

pytestmark = pytest.mark.timeout(300)
Check = Callable[[list[str], Checkout, TwinkleClient], None]
"""Checks the printed lines of a program, its files and its runs."""


def check_own_data(lines: list[str], checkout: Checkout, client: TwinkleClient) -> None:
    """Check that the loss of the questions falls, and that the downloaded folder is a peft adapter."""
    assert len(client.list_training_runs()) == 1
    losses = [float(line.split()[1]) for line in lines[:10]]
    assert losses[-1] < 0.9 * losses[0]
    assert (checkout.folder / 'shop-adapter' / 'adapter_model.safetensors').stat().st_size > 0


def check_validation(lines: list[str], checkout: Checkout, client: TwinkleClient) -> None:
    """Check that every third step has a measurement, and that the best checkpoint exists."""
    del checkout
    *printed, last = lines
    assert [int(line.split()[0]) for line in printed] == [3, 6, 9, 12]
    steps, _, path = last.rpartition('] ')
    assert steps == '[3, 6, 9, 12'
    assert path in {checkpoint.path for checkpoint in client.list_checkpoints()}


def check_grpo(lines: list[str], checkout: Checkout, client: TwinkleClient) -> None:
    """Check that each step prints the mean of its stored rewards, which are between 0 and 1."""
    del checkout
    assert [int(line.split()[0]) for line in lines] == [0, 1, 2, 3]
    groups = RunRollouts(client.list_training_runs()[0].run_id, client=client).list()
    assert [group.step for group in groups] == [3, 3, 2, 2, 1, 1, 0, 0]
    for step, line in enumerate(lines):
        rewards = [item.reward or 0.0 for group in groups if group.step == step for item in group.rollouts]
        assert all(0 <= reward <= 1 for reward in rewards)
        assert round(sum(rewards) / len(rewards), 3) == float(line.split()[1])


def check_connection(lines: list[str], checkout: Checkout, client: TwinkleClient) -> None:
    """Check that all services respond, and that the tiny model can be trained."""
    del checkout
    *services, models = lines
    assert {line.split()[0] for line in services} == {'gateway', 'model', 'sampler', 'data', 'checkpoint'}
    assert {line.split(maxsplit=1)[1] for line in services} == {'ok'}
    trained = {model.base_model for service in client.get_server_info().services for model in service.base_models}
    assert models == str(sorted(trained))


def check_reward(lines: list[str], checkout: Checkout, client: TwinkleClient) -> None:
    """Check that each step prints a mean reward and the mean length of the answers."""
    del checkout
    assert [int(line.split()[0]) for line in lines] == list(range(8))
    assert all(0 <= float(line.split()[1]) <= 1 for line in lines)
    assert client.list_training_runs()[0].step_count == 8


PROGRAMS: Mapping[str, Check] = {
    'docs/do/grpo-services.md': check_grpo,
    'docs/do/own-data.md': check_own_data,
    'docs/do/remote-server.md': check_connection,
    'docs/do/validation.md': check_validation,
    'docs/learn/custom-reward.md': check_reward,
}
"""Check of each page whose Python blocks are one program."""


def on_model(program: str, stack: StackState) -> str:
    """Replace the built-in model by the model of a stack."""
    return program.replace(f'{DOCUMENTED_MODEL!r}', f'{stack.base_model!r}')


@pytest.mark.parametrize('page', PROGRAMS)
def test_the_program_of_a_page_runs(page: str, tiny_stack: StackState, tenant_key: str, checkout: Checkout) -> None:
    """The program does what the page describes, in a folder with the files that the page shows."""
    checkout.connect(tiny_stack, tenant_key)
    for block in blocks():
        if block.page == page and block.title:
            (checkout.folder / block.title).write_text(block.text)
    lines = checkout.python(on_model(program_of(page), tiny_stack))
    with TwinkleClient(tiny_stack.address, tenant_key) as client:
        PROGRAMS[page](lines, checkout, client)


def test_programs_of_the_readme_train_and_answer(tiny_stack: StackState, tenant_key: str, checkout: Checkout) -> None:
    """The loss of the loop falls, its last line names a checkpoint, and OpenAI's SDK gets an answer from version 1."""
    loop, chat = blocks_of('README.md', 'python')
    assert loop.text.strip() in (ROOT / 'examples' / 'sft_in_20_lines.py').read_text()
    checkout.connect(tiny_stack, tenant_key)
    *steps, last = checkout.python(on_model(loop.text, tiny_stack))
    losses = [float(line.split()[1]) for line in steps if line[:1].isdigit()]
    assert losses[-1] < losses[0]
    assert '/weights/final' in last
    with TwinkleClient(tiny_stack.address, tenant_key) as client:
        (run,) = client.list_training_runs()
    values = {'127.0.0.1:PORT': tiny_stack.http_address, 'tml-...': tenant_key, '<run id>': run.run_id}
    assert ''.join(checkout.python(replaced(chat.text, values)))


def test_every_page_with_a_program_has_a_test() -> None:
    """A page with Python blocks has a check, and its program contains the model name that tests replace."""
    assert {block.page for block in blocks() if block.language == 'python'} == {*PROGRAMS, 'README.md'}
    programs = {page: program_of(page) for page in PROGRAMS}
    assert [page for page, text in programs.items() if 'MODEL' in text and repr(DOCUMENTED_MODEL) not in text] == []
