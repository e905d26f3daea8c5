"""A run's answers before and after its training, side by side, and links to the playground."""

import uuid
from collections.abc import Callable

import httpx
import pytest

from fixtures.console_browser import ConsolePage
from fixtures.console_data import STEPS, ConsoleData
from fixtures.console_rollouts import QUESTIONS, ROLLOUT_STEPS
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.rollouts import EVALUATION, RunRollouts
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]


async def test_answers_are_those_of_the_first_and_last_step(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """The page of a run shows each question with the stored answers of both steps and their versions."""
    with TwinkleClient(console_stack.address, console_data.key) as client:
        stored = RunRollouts(console_data.trained_run, client=client)
        answers = {
            step: [(await stored.get.aio(f'{step}/{EVALUATION}/{index}')).completion_text for index in range(4)]
            for step in (0, STEPS)
        }
    await logged_in.show(f'#/runs/{console_data.trained_run}', 'Ask again')
    panel = logged_in.page.get_by_role('region', name='Before and after')
    head = await panel.get_by_role('columnheader').all_inner_texts()
    assert head == ['Prompt', 'Before: step 0, base model', f'After: step {STEPS}, version 2']
    assert await panel.get_by_role('row').count() == 4
    await panel.get_by_role('button', name='More prompts').click()
    await panel.get_by_role('row').nth(4).wait_for()
    for index, question in enumerate(QUESTIONS):
        row = panel.get_by_role('row').nth(index + 1)
        texts = await row.get_by_role('group', name='Answer to').all_inner_texts()
        assert [text.split() for text in texts] == [answers[step][index].split() for step in (0, STEPS)]
        assert question in await row.inner_text()
    assert 'mean log-probability' in await panel.inner_text()
    assert await logged_in.violations() == []
    twin = (await logged_in.json_twin())['compared']
    assert [pair['last']['completion_text'] for pair in twin] == answers[STEPS]


async def test_one_click_asks_again(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """A link opens the playground with prompt and version; one click streams the answers of both weights."""
    page = logged_in.page
    await logged_in.show(f'#/runs/{console_data.trained_run}', 'Ask again')
    await page.get_by_role('link', name=f'Ask again: {QUESTIONS[1]}').click()
    await page.get_by_label('User message').wait_for()
    assert await page.get_by_label('User message').input_value() == QUESTIONS[1]
    assert await page.get_by_label('Version').input_value() == '2'
    assert await page.get_by_label('Temperature').input_value() == '0'
    await page.get_by_role('button', name='Sample', exact=True).and_(page.locator(':enabled')).click()
    for title, name in (('Base model', 'the base model'), ('Your weights', 'version 2')):
        await page.get_by_role('region', name=title).get_by_text(name, exact=True).wait_for()


async def test_prompts_of_training_are_compared(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """Prompts that the first and the last step share are compared if there are no answers to fixed questions."""
    page = logged_in.page
    await logged_in.show(f'#/runs/{console_data.rollout_run}', 'Before and after')
    panel = page.get_by_role('region', name='Before and after')
    await panel.get_by_text(f'After: step {ROLLOUT_STEPS - 1}, version {ROLLOUT_STEPS}').wait_for()
    await panel.get_by_role('button', name='More prompts').click()
    await panel.get_by_role('row').nth(4).wait_for()
    prompts = await panel.get_by_role('group', name='Prompt').all_inner_texts()
    assert sorted(prompts) == ['Count to three.', 'Name a colour.', 'Say hello.', 'What is the sea?']
    await panel.get_by_role('link', name='tokens of Say hello., version 1').click()
    await page.get_by_role('heading', name='Step 0, group 0001').wait_for()


async def test_new_answers_appear(page: ConsolePage, make_key: Callable[..., str], console_stack: StackState) -> None:
    """The panel appears in an open page once a question is answered at two steps, and then shows later answers."""
    key = make_key(f'asked-{uuid.uuid4().hex[:6]}', 'train')
    await page.log_in(key)
    panel = page.page.get_by_role('region', name='Before and after')
    with TwinkleClient(console_stack.address, key) as client:
        model = MultiLoraTransformersModel(console_stack.base_model, client=client)
        labels = {'name': 'asked'}
        run_id = await model.add_adapter_to_model.aio('asked', LoraConfig(r=4), user_metadata=labels)
        await page.show(f'#/runs/{run_id}', 'asked')
        for step, answer in enumerate(('I am *old*.', 'I am *new*.', 'I am *newer*.')):
            turns = [{'role': 'user', 'content': QUESTIONS[0]}, {'role': 'assistant', 'content': answer}]
            await RunRollouts(run_id, client=client).log.aio([{'messages': turns}], step=step, groups=[EVALUATION])
            if step:
                await panel.get_by_text(answer).wait_for()
            else:
                assert await panel.count() == 0
    assert await panel.get_by_role('group', name='Answer to').all_inner_texts() == ['I am *old*.', 'I am *newer*.']


async def test_a_link_opens_a_page(page: ConsolePage, console_stack: StackState, console_data: ConsoleData) -> None:
    """A one-time link that ends with a page shows this page after the login, even after a login with a key."""
    async with httpx.AsyncClient(base_url=console_stack.http_url) as http:
        response = await http.post('/console/api/links', headers={'authorization': f'Bearer {console_data.key}'})
    address = f'#/login/{response.json()["link"]}/runs/{console_data.trained_run}'
    await page.open(address)
    await page.page.get_by_role('heading', name='sft-cosine').wait_for()
    assert page.page.url.endswith(f'#/runs/{console_data.trained_run}')
    await page.page.get_by_role('button', name='Log out').click()
    await page.page.get_by_label('API key').wait_for()
    await page.open(address)
    await page.page.reload()
    await page.page.get_by_role('alert').get_by_text('Not logged in').wait_for()
    await page.page.get_by_label('API key').fill(console_data.key)
    await page.page.get_by_role('button', name='Log in').click()
    await page.page.get_by_role('heading', name='sft-cosine').wait_for()


async def test_keys_without_sampling_see_answers(
    page: ConsolePage, make_key: Callable[..., str], console_data: ConsoleData
) -> None:
    """A key without the scope `sample` can read the answers but has no link to the playground."""
    await page.log_in(make_key(console_data.tenant_id, 'train'))
    await page.show(f'#/runs/{console_data.trained_run}', 'Before: step 0')
    await page.page.get_by_role('group', name='Answer to').first.wait_for()
    assert await page.page.get_by_role('link', name='Ask again').count() == 0
