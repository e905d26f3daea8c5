"""Datasets in the console: rows of lazy datasets with their label mask, and rows that cannot be read."""

import pytest

from fixtures.console_browser import ConsolePage
from fixtures.console_data import BAD_ROW, CHATS, ConsoleData
from twinkle_client import TwinkleClient
from twinkle_client.dataset import DatasetMeta, LazyDataset
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]


async def test_rows_of_a_lazy_dataset_equal_those_of_an_eager_one(
    logged_in: ConsolePage, console_data: ConsoleData
) -> None:
    """A lazy dataset shows the tokens and label mask of an eager dataset, and names the row that fails."""
    shown: dict[str, list[list[tuple[str, str]]]] = {}
    for dataset_id in (console_data.dataset_id, console_data.lazy_dataset):
        await logged_in.show(f'#/data/{dataset_id}', 'of them trained')
        groups = logged_in.page.get_by_role('group', name='Tokens of row')
        await groups.nth(len(CHATS) - 1).locator('.token').first.wait_for()
        shown[dataset_id] = [
            await group.locator('.token').evaluate_all('all => all.map(one => [one.innerText, one.className])')
            for group in await groups.all()
        ]
    assert shown[console_data.lazy_dataset] == shown[console_data.dataset_id]
    kinds = {kind for row in shown[console_data.lazy_dataset] for _, kind in row}
    assert {'trained' in kind for kind in kinds} == {True, False}
    bad = logged_in.page.get_by_text(f'rows[{BAD_ROW}]')
    assert 'more than max_length' in await bad.inner_text()
    twin = await logged_in.json_twin()
    assert [bool(row['problem']) for row in twin['rows']] == [index == BAD_ROW for index in range(len(CHATS) + 1)]
    recipe = await logged_in.page.get_by_role('region', name='Recipe').inner_text()
    assert 'Set the template Template' in recipe


async def test_more_rows_are_read_on_request(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """A dataset that is not encoded shows its columns, 20 rows at a time."""
    with TwinkleClient(console_stack.address, console_data.key) as client:
        rows = [{'text': f'row number {index}'} for index in range(45)]
        dataset = LazyDataset(DatasetMeta(data=rows), client=client)
        dataset_id = (await dataset.describe.aio()).dataset_id
    page = logged_in.page
    await logged_in.show(f'#/data/{dataset_id}', 'row number 19')
    assert await page.get_by_text('row number 20').count() == 0
    for last in (39, 44):
        await page.get_by_role('button', name='More rows').click()
        await page.get_by_text(f'row number {last}').wait_for()
    assert await page.get_by_role('button', name='More rows').is_disabled()
    assert await logged_in.violations() == []
