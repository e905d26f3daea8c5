"""The tab with a run's rollouts: groups, completions side by side, colours, and the keyboard."""

from collections.abc import Callable

import pytest

from fixtures.console_browser import ConsolePage
from fixtures.console_data import ConsoleData
from fixtures.console_rollouts import COMPLETIONS, ROLLOUT_STEPS
from twinkle_client import TwinkleClient
from twinkle_client.rollouts import RunRollouts
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]

ADDRESS = '#/runs/{rollout_run}/rollouts'


async def test_groups_are_those_of_the_client(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """The page and its JSON have the client's groups and rollouts, and mark groups with equal rewards."""
    with TwinkleClient(console_stack.address, console_data.key) as client:
        stored = RunRollouts(console_data.rollout_run, client=client)
        groups = await stored.list.aio()
        first = [await stored.get.aio(summary.rollout_id) for summary in groups[0].rollouts]
    page = logged_in.page
    await logged_in.show(ADDRESS.format_map(vars(console_data)), f'version {ROLLOUT_STEPS}: tokens')
    options = page.get_by_role('option')
    assert await options.count() == len(groups)
    equal = [group for group in groups if group.is_degenerate]
    assert len(equal) >= ROLLOUT_STEPS
    assert await options.filter(has_text='all equal').count() == len(equal)
    assert await page.locator('figure').get_attribute('data-points') == str(3 * ROLLOUT_STEPS)
    for rollout in first:
        card = page.get_by_role('article', name=f'Rollout {rollout.index}')
        tokens = card.get_by_role('group', name='Tokens of rollout')
        assert await tokens.locator('.token').count() == len(rollout.token_ids)
        assert f'{round(rollout.reward_parts["letters"], 4):g}' in await card.inner_text()
    twin = (await logged_in.json_twin())['rollouts']
    shown = [(int(group.get('step', 0)), group['group_id'], group['reward'].get('mean', 0)) for group in twin['groups']]
    assert shown == [(group.step, group.group_id, group.reward.mean) for group in groups]
    texts = [response['rollout'].get('completion_text', '') for response in twin['rollouts']]
    assert texts == [rollout.completion_text for rollout in first]


async def test_the_keyboard_selects_groups_and_rollouts(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """Arrows select groups, rollouts and tokens, page keys select steps, and the address has the selection."""
    page, newest = logged_in.page, ROLLOUT_STEPS - 1
    await logged_in.show(ADDRESS.format_map(vars(console_data)), f'version {ROLLOUT_STEPS}: tokens')
    groups = page.get_by_role('listbox', name='Groups by step')
    for key, step, group in (
        ('ArrowDown', newest, '0001'),
        ('PageDown', newest - 1, '0000'),
        ('End', 0, '0003'),
        ('ArrowUp', 0, '0002'),
        ('PageUp', 1, '0000'),
    ):
        await groups.press(key)
        await page.get_by_role('heading', name=f'Step {step}, group {group}').wait_for()
        assert await groups.locator('[aria-selected=true]').inner_text() != ''
    await page.get_by_role('article', name='Rollout 1').get_by_text('version 2', exact=True).wait_for()
    for _ in range(COMPLETIONS + 1):
        await groups.press('ArrowRight')
    selected = page.locator('article[aria-current]')
    assert await selected.get_attribute('aria-label') == f'Rollout {COMPLETIONS - 1}'
    assert page.url.endswith(f'group=1%2F0000&rollout={COMPLETIONS - 1}')
    await page.reload()
    await selected.get_by_role('group', name='Tokens of rollout').press('ArrowRight')
    await selected.get_by_text('token 0, id ').wait_for()


async def test_tokens_are_coloured_by_advantage(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """The colour of each token of a completion shows the sign of the completion's advantage."""
    page = logged_in.page
    await logged_in.show(ADDRESS.format_map(vars(console_data)), f'version {ROLLOUT_STEPS}: tokens')
    groups = page.get_by_role('listbox', name='Groups by step')
    equal = groups.get_by_role('option').filter(has_text='all equal')
    await equal.first.click()
    await page.get_by_text('all rewards are equal: no signal').wait_for()
    await groups.get_by_role('option').filter(has_not_text='all equal').first.click()
    await page.get_by_role('article', name=f'Rollout {COMPLETIONS - 1}').wait_for()
    await page.get_by_label('advantage', exact=True).check()
    responses = (await logged_in.json_twin())['rollouts']['rollouts']
    assert len(responses) == COMPLETIONS
    for response in responses:
        rollout = response['rollout']
        sign = 'positive-' if rollout['advantage'] > 0 else 'negative-'
        card = page.get_by_role('article', name=f'Rollout {rollout["index"]}')
        tokens = card.get_by_role('group', name='Tokens of rollout').locator('.token')
        assert await tokens.count() == await card.locator(f'.token[class*={sign}]').count() > 0
    assert await logged_in.violations() == []


async def test_new_rollouts_appear(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """A run without rollouts explains how to store rollouts; stored rollouts appear in the open page."""
    page, run_id = logged_in.page, console_data.compared_run
    await logged_in.show(f'#/runs/{run_id}/rollouts', 'No rollouts yet')
    assert await logged_in.violations() == []
    turns = [{'role': 'user', 'content': 'What is 2 + 2?'}, {'role': 'assistant', 'content': 'It is four.'}]
    with TwinkleClient(console_stack.address, console_data.key) as client:
        await RunRollouts(run_id, client=client).log.aio([{'messages': turns}], step=7, rewards=[0.25])
    for text in ('Step 7, group 0000', 'What is 2 + 2?', 'It is four.'):
        await page.get_by_text(text).wait_for()
    assert await logged_in.violations() == []


async def test_older_groups_are_read_on_request(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """A run with many groups shows the newest groups, and more groups after a click."""
    page, counts = logged_in.page, {2: 100, 1: 1000}
    turns = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    with TwinkleClient(console_stack.address, console_data.key) as client:
        stored = RunRollouts(console_data.long_run, client=client)
        for step, count in counts.items():
            ids = [f'g{number}' for number in range(count)]
            await stored.log.aio([{'messages': turns}] * count, step=step, rewards=[step] * count, groups=ids)
    await logged_in.show(f'#/runs/{console_data.long_run}/rollouts', 'Older groups')
    options = page.get_by_role('option')
    assert await options.count() == 1000
    await page.get_by_role('button', name='Older groups').click()
    await page.get_by_role('button', name='Older groups').wait_for(state='detached')
    assert await options.count() == sum(counts.values())


async def test_texts_need_no_scope(page: ConsolePage, make_key: Callable[..., str], console_data: ConsoleData) -> None:
    """A key without the scope `sample` sees rewards and texts, but no tokens."""
    await page.log_in(make_key(console_data.tenant_id, 'train'))
    await page.show(ADDRESS.format_map(vars(console_data)), 'needs the scope sample')
    assert await page.page.get_by_role('article').count() == COMPLETIONS
    assert await page.page.get_by_role('group', name='Tokens of rollout').count() == 0
