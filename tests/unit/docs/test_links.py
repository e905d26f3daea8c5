"""Tests of links and included code on the documentation site."""

import re
from pathlib import Path

import pytest

from docs.site.decisions import decisions_page
from docs.site.links import InvalidLink, LinkRewriter, definition
from fixtures.source_tree import ROOT

PAGES = {'index.md': 'docs/index.md', 'do/data.md': 'docs/do/data.md', 'overview.md': 'README.md'}
GENERATED = {'protos/a.proto': 'reference/api/a.md'}
PAGES |= {'adr/index.md': 'docs/adr/index.md', 'images/run.png': 'docs/images/run.png'}
PROGRAM = (
    'import os\n\nLIMIT = 3\n\n\n@cached\ndef train(steps):\n    return steps\n\n\ndef main():\n    train(LIMIT)\n'
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with a program and a folder."""
    (tmp_path / 'examples').mkdir()
    (tmp_path / 'examples' / 'train.py').write_text(PROGRAM)
    return tmp_path


def rewrite(tree: Path, markdown: str, *, page: str = 'do/data.md', source_url: str = '') -> str:
    return LinkRewriter(tree, PAGES, generated=GENERATED, source_url=source_url).rewrite(markdown, page)


@pytest.mark.parametrize(
    ('markdown', 'expected'),
    [
        ('[overview](../../README.md#the-loop)', '[overview](../overview.md#the-loop)'),
        ('[the contract](../../protos/a.proto)', '[the contract](../reference/api/a.md)'),
        ('[decisions](../adr)', '[decisions](../adr/index.md)'),
        ('[here](#below), [out](https://a.example/x)', '[here](#below), [out](https://a.example/x)'),
        ('[the program](../../examples/train.py)', 'the program (`examples/train.py`)'),
        ('[examples/train.py](../../examples/train.py)', '`examples/train.py`'),
        ('```\n[x](missing.md)\n```', '```\n[x](missing.md)\n```'),
    ],
)
def test_a_link_works_on_the_site(tree: Path, markdown: str, expected: str) -> None:
    """Links to pages are relative to the page, links to other files become paths, and code stays unchanged."""
    assert rewrite(tree, markdown) == expected


def test_a_picture_of_a_page_outside_docs_is_found(tree: Path) -> None:
    """The path of a picture is relative to the page on the site; a missing picture is refused."""
    assert rewrite(tree, '![x](docs/images/run.png)', page='overview.md') == '![x](images/run.png)'
    with pytest.raises(InvalidLink):
        rewrite(tree, '![x](examples/train.py)', page='overview.md')


def test_files_have_an_address_if_one_is_configured(tree: Path) -> None:
    """The address contains the path of the file."""
    expected = '[it](https://forge.example/main/examples/train.py)'
    found = rewrite(tree, '[it](../../examples/train.py)', source_url='https://forge.example/main/{path}')
    assert found == expected


def test_a_link_to_a_missing_file_is_refused(tree: Path) -> None:
    """The error names the page and the target."""
    with pytest.raises(InvalidLink, match=r'docs/do/data\.md links to .*gone'):
        rewrite(tree, '[x](../gone.md)')


def test_a_line_with_a_code_title_is_replaced_by_the_source(tree: Path) -> None:
    """The block shows the named definitions of the file, with their decorators."""
    found = rewrite(tree, 'Text.\n\n[code](../../examples/train.py "code: LIMIT, train")\n\nEnd.')
    block = 'LIMIT = 3\n\n\n@cached\ndef train(steps):\n    return steps\n'
    assert found == f'Text.\n\n```python title="examples/train.py"\n{block}```\n\nEnd.'


def test_a_method_is_shown_without_its_indentation() -> None:
    """The name `Class.method` selects a method, and its source starts in the first column."""
    text = 'class Loop:\n    """A loop."""\n\n    def learn(self):\n        return 1\n'
    assert definition('loop.py', text, 'Loop.learn') == 'def learn(self):\n    return 1'


def test_an_undefined_name_is_refused() -> None:
    """A name that the file does not define fails the build."""
    with pytest.raises(InvalidLink, match=r'train\.py does not define'):
        definition('train.py', PROGRAM, 'gone')


def test_decisions_are_listed_with_title_date_and_status(tmp_path: Path) -> None:
    """Each record is one row, and the template is omitted."""
    (tmp_path / '0000-template.md').write_text('# NNNN. A decision')
    (tmp_path / '0007-a.md').write_text('# 0007. A title\nthat wraps\n\nDate: 2026-01-02. Status: accepted.\n\nText.')
    assert decisions_page(tmp_path).endswith('| 0007 | [A title that wraps](0007-a.md) | 2026-01-02 | accepted |\n')


def test_a_decision_without_a_date_is_refused(tmp_path: Path) -> None:
    """The error for a record that does not begin like the template names the record."""
    (tmp_path / '0007-a.md').write_text('# 0007. A title\n\nText.\n')
    with pytest.raises(ValueError, match=r'0007-a\.md: must begin like'):
        decisions_page(tmp_path)


def test_documented_programs_exist() -> None:
    """Each `python -m` command in the documents uses a module of the repository."""
    commands = [
        (path.name, module)
        for path in sorted((ROOT / 'docs').rglob('*.md'))
        for module in re.findall(r'python -m ((?:examples|services)[\w.]*\w)', path.read_text(encoding='utf-8'))
    ]
    files = [(page, module, ROOT / module.replace('.', '/')) for page, module in commands]
    missing = [
        (page, module)
        for page, module, file in files
        if not file.with_suffix('.py').is_file() and not (file / '__main__.py').is_file()
    ]
    assert missing == []
    assert len(commands) > 20


def test_each_tutorial_has_a_picture_with_a_description() -> None:
    """Every tutorial shows at least one picture with a description, and the files of all pictures exist."""
    pictures = {
        page.name: re.findall(r'^!\[([^\]]+)\]\(([^)]+)\)$', page.read_text(encoding='utf-8'), re.MULTILINE)
        for page in sorted((ROOT / 'docs' / 'learn').glob('*.md'))
    }
    assert len(pictures) >= 8
    assert [page for page, found in pictures.items() if not found] == []
    paths = [ROOT / 'docs' / 'learn' / path for found in pictures.values() for _, path in found]
    assert [path for path in paths if not path.is_file()] == []
