"""The built documentation site in Chromium: links, pictures, the search, and narrow windows."""

import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from fixtures.console_browser import chromium
from fixtures.source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
in_module_loop = pytest.mark.asyncio(loop_scope='module')
SEARCHES = {
    'fine-tune on my CSV': 'do/own-data/',
    'validate every N steps': 'do/validation/',
    'GRPO over the services': 'do/grpo-services/',
    'connect to a remote server': 'do/remote-server/',
}
"""Tasks of new users, each with the page that describes the task."""
TUTORIALS = sorted(path.stem for path in (ROOT / 'docs' / 'learn').glob('*.md'))
PHONE = {'width': 390, 'height': 844}


class _QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without logging requests."""

    def log_message(self, *args: Any) -> None:
        """Discard a message."""


class _Links(HTMLParser):
    """Collects the anchors of a page and the addresses of its links."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the attributes of an element."""
        values = dict(attrs)
        self.anchors.update(filter(None, [values.get('id'), values.get('name')]))
        if tag in {'a', 'img'}:
            self.targets.update(filter(None, [values.get('href'), values.get('src')]))


@pytest.fixture(scope='module')
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built site."""
    folder = tmp_path_factory.mktemp('site')
    command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope='module')
def page_names(site: Path) -> list[str]:
    """Addresses of the pages, except decision records, relative to the site's address."""
    names = [file.parent.relative_to(site).as_posix() for file in site.rglob('index.html')]
    return sorted(name for name in names if not re.match(r'adr/\d', name))


@pytest.fixture(scope='module')
def address(site: Path) -> Iterator[str]:
    """Address of the site, with a slash at the end."""
    with ThreadingHTTPServer(('127.0.0.1', 0), partial(_QuietHandler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f'http://127.0.0.1:{server.server_address[1]}/'
        server.shutdown()
        thread.join()


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def browser() -> AsyncIterator[Browser]:
    """Chromium, which the tests share."""
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(loop_scope='module')
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A page with an empty profile, in a window as wide as a phone."""
    context = await browser.new_context(viewport=PHONE)  # type: ignore[arg-type]
    yield await context.new_page()
    await context.close()


def links_of(site: Path) -> dict[str, _Links]:
    """Return the links of each page of the site, by the page's path."""
    pages: dict[str, _Links] = {}
    for file in site.rglob('*.html'):
        parsed = _Links()
        parsed.feed(file.read_text(encoding='utf-8'))
        pages[file.relative_to(site).as_posix()] = parsed
    return pages


def test_every_link_and_anchor_exists(site: Path) -> None:
    """Each relative address is a file of the site, and each anchor is an element of its page."""
    pages, broken = links_of(site), list[tuple[str, str]]()
    for path, parsed in pages.items():
        for target in parsed.targets:
            parts = urlsplit(target)
            if parts.scheme or path == '404.html':
                continue
            file = ((site / path).parent / unquote(parts.path)).resolve() if parts.path else site / path
            file = file / 'index.html' if file.is_dir() else file
            found = pages.get(file.relative_to(site.resolve()).as_posix()) if file.is_relative_to(site) else None
            if not file.is_file() or (parts.fragment and found and unquote(parts.fragment) not in found.anchors):
                broken.append((path, target))
    assert broken == []
    assert len(pages) > 100


@in_module_loop
@pytest.mark.parametrize('name', TUTORIALS)
async def test_every_tutorial_shows_a_picture(page: Page, address: str, name: str) -> None:
    """The picture is loaded and is large enough to read its labels, even on a phone."""
    await page.goto(f'{address}learn/{name}/')
    await page.wait_for_load_state('networkidle')
    pictures: list[list[float]] = await page.evaluate(
        '[...document.querySelectorAll("article img")].map(image => [image.naturalWidth, image.width])'
    )
    assert pictures
    assert all(natural > 600 and shown > 600 for natural, shown in pictures)


@in_module_loop
@pytest.mark.parametrize('text', SEARCHES)
async def test_tasks_are_found_from_the_first_page(page: Page, address: str, text: str) -> None:
    """The first page links to the page of each task, and the search shows this page in its first three results."""
    await page.goto(address)
    row = page.locator('tr', has_text=re.compile(re.escape(text).replace('GRPO', r'.*\(GRPO\)'), re.IGNORECASE))
    assert await row.get_by_role('link').get_attribute('href') == SEARCHES[text]
    await page.locator('label[for="__search"]').first.click()
    await page.get_by_role('textbox', name='Search').fill(text)
    results = page.locator('.md-search-result__item > a')
    await results.first.wait_for()
    found = [await item.get_attribute('href') or '' for item in await results.all()]
    assert SEARCHES[text] in [urlsplit(item).path.removeprefix('/') for item in found[:3]]


@in_module_loop
async def test_no_page_is_wider_than_a_phone(page: Page, page_names: list[str], address: str) -> None:
    """Wide tables and code scroll inside the page. Decision records have the layout of other pages."""
    wide: list[str] = []
    for name in page_names:
        await page.goto(f'{address}{name}/')
        if await page.evaluate('document.documentElement.scrollWidth > innerWidth'):
            wide.append(name)
    assert wide == []


@in_module_loop
async def test_reference_tables_show_every_column_on_a_phone(page: Page, address: str) -> None:
    """Each cell of the configuration page is inside the window."""
    await page.goto(f'{address}reference/configuration/')
    cells = '[...document.querySelectorAll("article td")]'
    right: float = await page.evaluate(f'Math.max(...{cells}.map(cell => cell.getBoundingClientRect().right))')
    assert right <= PHONE['width']
    assert await page.locator('article td').count() > 500
