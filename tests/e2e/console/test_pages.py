"""Every page of the console shows real data, has no accessibility violations, and shows its data as JSON."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.async_api import Browser

from fixtures.console_browser import ConsolePage, console_page, save_picture
from fixtures.console_data import LONG_CURVE_POINTS, STEPS, ConsoleData
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]

PAGES = {
    'overview': ('#/overview', 'in 24 hours'),
    'runs': ('#/runs', 'sft-high-rate'),
    'comparison': ('#/runs?compare={trained_run}&compare={compared_run}', 'Comparison of 2 runs'),
    'run': ('#/runs/{trained_run}', 'Ask again'),
    'rollouts': ('#/runs/{rollout_run}/rollouts?group=2/0002', 'version 3: tokens'),
    'operations': ('#/runs/{trained_run}/operations', 'Queue and device time'),
    'versions': ('#/runs/{trained_run}/versions', 'with optimizer'),
    'configuration': ('#/runs/{trained_run}/configuration', 'AdamW'),
    'playground': ('#/playground?run={trained_run}', 'Sample'),
    'data': ('#/data', 'input_ids'),
    'dataset': ('#/data/{dataset_id}', 'tokens, '),
    'lazy-dataset': ('#/data/{lazy_dataset}', 'cannot be read'),
    'traces': ('#/traces', 'gateway'),
    'trace': ('#/traces/{shared_trace}?span={shared_pass}', 'twinkle.adapter_count'),
    'usage': ('#/usage', 'Usage by run'),
    'fleet': ('#/fleet', 'Live versions'),
    'administration': ('#/admin', '{tenant_id}'),
    'tenant': ('#/admin/{tenant_id}', 'Save the quota'),
}
"""Address of each page, and a text that the page shows once its data are loaded."""
EMPTY_PAGES = {
    '#/overview': 'Start a first run',
    '#/runs': 'No runs yet',
    '#/data': 'No datasets',
    '#/usage': 'No usage in this period',
}


def _filled(name: str, data: ConsoleData) -> list[str]:
    return [text.format_map(vars(data)) for text in PAGES[name]]


@pytest.mark.parametrize('scheme', ['light', 'dark'])
async def test_the_login_page_is_accessible(
    browser: Browser, console_stack: StackState, scheme: str, pictures: Path | None
) -> None:
    """The login page has no accessibility violations."""
    async with console_page(browser, console_stack.http_url, scheme=scheme) as page:
        await page.open()
        await page.page.get_by_label('API key').wait_for()
        assert await page.violations() == []
        await save_picture(page, pictures, 'login', scheme)


@pytest.mark.parametrize('name', PAGES)
async def test_a_page_shows_data_and_is_accessible(
    logged_in: ConsolePage, console_data: ConsoleData, name: str, pictures: Path | None
) -> None:
    """A page shows its data without violations in both colour schemes, and its JSON contains the same data."""
    address, expected = _filled(name, console_data)
    await logged_in.show(address, expected)
    if name == 'playground':
        await _sample(logged_in)
    if name == 'rollouts':
        await logged_in.page.get_by_role('article', name='Rollout 3').scroll_into_view_if_needed()
    for scheme in ('light', 'dark'):
        await logged_in.page.emulate_media(color_scheme=scheme, reduced_motion='reduce')
        assert await logged_in.violations() == [], scheme
        await save_picture(logged_in, pictures, name, scheme)
    assert await logged_in.json_twin()


async def _sample(page: ConsolePage) -> None:
    """Sample the base model and the run, and wait for both answers."""
    await page.page.get_by_label('Max. tokens').fill('24')
    await page.page.get_by_role('button', name='Sample', exact=True).click()
    for title in ('Base model', 'Your weights'):
        await page.page.get_by_role('region', name=title).get_by_text('Mean log-probability').wait_for()
    await page.page.get_by_role('button', name='Sample', exact=True).and_(page.page.locator(':enabled')).wait_for()


async def test_empty_pages_explain_how_to_create_data(page: ConsolePage, make_key: Callable[..., str]) -> None:
    """A tenant without data sees which data is missing and how to create it, without violations."""
    await page.log_in(make_key(f'empty-{uuid.uuid4().hex[:6]}', 'train', 'data'))
    for address, expected in EMPTY_PAGES.items():
        await page.show(address, expected)
        assert await page.violations() == []


async def test_runs_are_filtered_and_compared(logged_in: ConsolePage) -> None:
    """A tag, a text and a state select runs; two selected runs are drawn in one chart."""
    page = logged_in.page
    links = page.get_by_role('table').get_by_role('link')
    await logged_in.show('#/runs', 'grpo-long')
    await page.get_by_role('button', name='Filter by task=identity').first.click()
    await page.get_by_text('grpo-long').wait_for(state='detached')
    assert sorted(await links.all_inner_texts()) == ['sft-cosine', 'sft-high-rate', 'sft-low-rate']
    await page.get_by_label('Text in name, id or tag').fill('RATE')
    await page.get_by_text('sft-cosine').wait_for(state='detached')
    assert sorted(await links.all_inner_texts()) == ['sft-high-rate', 'sft-low-rate']
    await page.get_by_label('State').select_option('Ended')
    await page.get_by_text('No run matches the filters').wait_for()
    await page.get_by_role('button', name='Show all runs').click()
    await page.get_by_text('grpo-long').wait_for()
    for name in ('sft-high-rate', 'sft-low-rate'):
        await page.get_by_label(f'Compare {name}').check()
    chart = page.locator('figure')
    await chart.get_by_text('sft-low-rate').wait_for()
    assert await chart.get_attribute('data-points') == str(2 * STEPS)


async def test_a_long_curve_is_drawn_completely(
    logged_in: ConsolePage, console_data: ConsoleData, record_property
) -> None:
    """All points of a long curve are drawn; the longest frames during zooming and smoothing are recorded."""
    page = logged_in.page
    await logged_in.show(f'#/runs/{console_data.long_run}', 'train/loss')
    await page.locator(f'figure[data-points="{LONG_CURVE_POINTS}"]').wait_for()
    await page.evaluate(_RECORD_FRAMES)
    plot = page.locator('figure .u-over')
    box = await plot.bounding_box()
    assert box
    begin, end = ({'x': share * box['width'], 'y': box['height'] / 2} for share in (0.2, 0.8))
    # `drag_to` waits until the plot has stopped moving, which it does while parts of the page above it are loaded.
    await plot.drag_to(plot, source_position=begin, target_position=end, steps=10)
    await page.get_by_role('button', name='All steps').click()
    await page.get_by_label('Smoothing').fill('0.9')
    await page.get_by_label('Log scale').check()
    frames = await page.evaluate('new Promise(done => requestAnimationFrame(() => done(window.frames_)))')
    draws = await page.evaluate("performance.getEntriesByName('chart').map(entry => entry.duration)")
    assert draws
    record_property('longest frame [ms]', round(max(frames), 1))
    record_property(f'longest drawing of {LONG_CURVE_POINTS} points [ms]', round(max(draws), 1))


_RECORD_FRAMES = """() => {
  window.frames_ = [];
  let last = performance.now();
  const record = now => { window.frames_.push(now - last); last = now; requestAnimationFrame(record); };
  requestAnimationFrame(record);
}"""
