"""The first page: the deployment, the tenant's work, its newest runs, and instructions for a first run."""

import asyncio
import os
import sys
import threading
import uuid
from collections.abc import Callable

import pytest

from fixtures.console_browser import ConsolePage
from fixtures.console_data import CHATS, ConsoleData
from twinkle.data_format import LoraConfig
from twinkle.template import Template
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.quotas import Quotas
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]


async def test_numbers_are_those_of_the_services(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """The first page shows services, samplers, usage, and the newest runs with their loss."""
    page = logged_in.page
    await page.get_by_role('heading', name='Overview').wait_for()
    work = page.get_by_role('region', name='Your work')
    await work.get_by_text('in 24 hours').first.wait_for()
    with TwinkleClient(console_stack.address, console_data.key) as client:
        usages = await Quotas(client=client).usage.aio()
        runs = await client.list_training_runs.aio()
    for tokens in ('trained_token_count', 'sampled_token_count'):
        total = sum(getattr(usage, tokens) for usage in usages)
        assert total > 0
        await work.get_by_text(f'{total:,}', exact=True).wait_for()
    assert f'of {len(runs)}' in await work.inner_text()
    deployment = await page.get_by_role('region', name='Deployment').inner_text()
    assert '5 of 5' in deployment
    assert '1 of 1' in deployment
    newest = page.get_by_role('region', name='Newest runs')
    links = await newest.get_by_role('row').get_by_role('link').all_inner_texts()
    assert links == [run.user_metadata['name'] for run in runs[:6]]
    assert await newest.get_by_role('img', name='train/loss from').count() == len(links)


async def test_scopes_determine_the_parts(
    page: ConsolePage, make_key: Callable[..., str], console_data: ConsoleData
) -> None:
    """The number of samplers needs the scope `operator`, their load `sample`, and the queue of operations `train`."""
    parts = {
        ('sample',): (False, True, False),
        ('train',): (False, False, True),
        ('operator',): (True, True, False),
    }
    for scopes, expected in parts.items():
        await page.log_in(make_key(console_data.tenant_id, *scopes))
        await page.page.get_by_text('in 24 hours').first.wait_for()
        if expected[1]:
            await page.page.get_by_text('Sequences running').wait_for()
        names = ('Samplers ready', 'Sequences running', 'Operations in queues')
        shown = [await page.page.get_by_text(name, exact=True).count() == 1 for name in names]
        assert tuple(shown) == expected, scopes
        await page.page.get_by_role('button', name='Log out').click()
        await page.page.get_by_label('API key').wait_for()


async def test_the_three_lines_start_a_run(
    page: ConsolePage, make_key: Callable[..., str], console_stack: StackState
) -> None:
    """The program on a new tenant's page creates a run, which then appears in the page."""
    key = make_key(f'new-{uuid.uuid4().hex[:6]}', 'train')
    await page.log_in(key)
    code = await page.page.get_by_role('region', name='Program').inner_text()
    assert len(code.splitlines()) == 3
    variables = {**os.environ, 'TWINKLE_SERVER_URL': console_stack.address, 'TWINKLE_API_KEY': key}
    program = await asyncio.create_subprocess_exec(sys.executable, '-c', code, env=variables)
    assert await program.wait() == 0
    await page.page.get_by_role('region', name='Newest runs').get_by_role('link', name='first').wait_for()
    assert await page.violations() == []


async def test_queued_operations_are_counted(
    page: ConsolePage, make_key: Callable[..., str], console_stack: StackState
) -> None:
    """The run of a training program is shown as training, with its queue position or its operation."""
    key = make_key(f'busy-{uuid.uuid4().hex[:6]}', 'train')
    await page.log_in(key)
    has_seen = threading.Event()
    training = asyncio.create_task(asyncio.to_thread(_train_until, has_seen, console_stack, key))
    try:
        row = page.page.get_by_role('region', name='Newest runs').get_by_role('row').filter(has_text='busy')
        # The page reads the list again every few seconds, and shows the state at that moment.
        await row.get_by_text('training', exact=True).wait_for(timeout=60_000)
        shown = await row.inner_text()
    finally:
        has_seen.set()
        await training
    assert 'is running' in shown or 'ahead in the queue' in shown


def _train_until(has_seen: threading.Event, stack: StackState, key: str) -> None:
    """Train a run named 'busy' until the event is set."""
    features = Template(stack.base_model).batch_encode([dict(chat) for chat in CHATS])
    with TwinkleClient(stack.address, key) as client:
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        model.add_adapter_to_model('busy', LoraConfig(r=4), user_metadata={'name': 'busy'})
        while not has_seen.is_set():
            with model.pipeline():
                for _ in range(64):
                    model.forward_backward.submit(features)
