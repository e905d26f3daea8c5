"""A test of this folder runs every code block in the documents for new users, unless a list states why not.

`test_programs` and `test_commands` check that they run the Python and shell blocks of all pages.
"""

import re

from fixtures.documented import INCLUDE, NOT_RUN, blocks, blocks_of
from fixtures.source_tree import ROOT

LANGUAGES = {'python', 'sh', 'text', '', INCLUDE}
"""Languages of blocks. Blocks without a language show output or drawings; `text` with a title shows a file."""


def test_every_fence_is_a_block() -> None:
    """No page has a fence that the inventory misses, for example because the fence is indented."""
    for page in {block.page for block in blocks()}:
        fences = re.findall(r'^ *(?:```|~~~)', (ROOT / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * len([block for block in blocks() if block.page == page and block.language != INCLUDE])


def test_every_block_has_a_language_that_tests_know() -> None:
    """Blocks in another language, such as JSON, need a test in this folder."""
    assert [block.name for block in blocks() if block.language not in LANGUAGES] == []
    assert len([block for block in blocks() if block.is_run]) > 40


def test_every_shown_file_is_read_by_the_program_of_its_page() -> None:
    """The program of a page opens each file that the page shows with a name."""
    for block in blocks():
        if block.language == 'text' and block.title:
            assert any(repr(block.title) in item.text for item in blocks_of(block.page, 'python')), block.name


def test_every_included_function_belongs_to_a_command_of_its_page() -> None:
    """A page with functions of an example has the command that runs this example."""
    for block in blocks():
        for file, _ in block.included:
            command = f'-m {file.removesuffix(".py").replace("/", ".")}'
            assert any(command in item.text for item in blocks_of(block.page, 'sh')), block.name


def test_blocks_that_are_not_run_exist() -> None:
    """The list of reasons has no entry for a removed or changed block."""
    assert {(block.page, block.command) for block in blocks()} >= NOT_RUN.keys()
    assert len(NOT_RUN) <= 2
