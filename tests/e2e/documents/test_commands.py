"""Commands of the documents for new users, on a tiny model. Slow tests run them on the real model with few steps."""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fixtures.documented import DOCUMENTED_MODEL, Checkout, blocks, blocks_of, replaced
from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack

pytestmark = pytest.mark.timeout(300)
PAGES_OF_COMMANDS = sorted(
    {
        block.page
        for block in blocks()
        if block.language == 'sh' and (block.page.startswith('docs/learn/') or block.page == 'docs/index.md')
    }
)
"""Pages whose commands need no address or key."""
SHORTER = {
    'async_rl': '--steps 2 --samples 4',
    'dpo': '--steps 2 --held-out 2',
    'four_tenants': '--steps 2 --batch-size 2 --generations 2',
    'grpo_arithmetic': '--steps 2 --prompts 2 --completions 6 --held-out 1',
    'sft_self_cognition': '--epochs 1 --examples 16',
    'tool_use': '--rounds 1 --held-out 2 --held-out-samples 1',
    'vision_sft': '--steps 2',
}
"""Options for fewer steps and smaller batches, by recipe. All other options are as documented."""
START = re.compile(r'^(\./run twinkle up(?: --\w+ \w+)*) +# in one terminal\n', re.MULTILINE)
RECIPE = re.compile(r'(-m examples\.cookbook\.(\w+)[^#\n]*)')


def shortened(script: str) -> str:
    """Add the options in `SHORTER` to the recipes of a script."""
    return RECIPE.sub(lambda match: f'{match[1]} {SHORTER[match[2]]} ', script)


@contextmanager
def running(checkout: Checkout, command: str) -> Iterator['subprocess.Popen[str]']:
    """Run a command that starts services, and interrupt it at the end of the block unless it has ended."""
    with subprocess.Popen(
        command.split(), cwd=checkout.folder, env=checkout.variables(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any('Ctrl-C' in line for line in process.stdout), 'the services did not start'
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    assert process.returncode == 0


def printed_output(page: str) -> list[str]:
    """Return the lines that a page shows as its commands' output."""
    shown = [block.text for block in blocks() if block.page == page and block.language == 'text' and not block.title]
    return ''.join(shown).splitlines()


def test_every_page_with_commands_has_a_test() -> None:
    """Pages whose commands need an address, a key or a stack have separate tests; all other pages share one test."""
    pages = {block.page for block in blocks() if block.language == 'sh'}
    assert pages == {*PAGES_OF_COMMANDS, 'README.md', 'docs/do/remote-server.md'}


def test_commands_of_the_readme_describe_the_stack(tiny_stack: StackState, checkout: Checkout) -> None:
    """`status` lists the services, `sample` prints an answer, and `trace` shows the services of the sampling call."""
    block, _, _ = blocks_of('README.md', 'sh')
    script, last, _ = block.text.partition('./run twinkle down\n')
    assert last
    checkout.environment.update(TWINKLE_STATE_DIR=str(tiny_stack.state_dir))
    output = '\n'.join(checkout.sh(script))
    assert output.count('serving') >= 5
    assert f'http://{tiny_stack.http_address}/console/#/login/' in output
    assert 'Sampler/Sample' in output


def test_buf_prints_the_methods_of_the_server(tiny_stack: StackState, tenant_key: str, checkout: Checkout) -> None:
    """The call without generated code returns the version and the methods as JSON."""
    _, block, _ = blocks_of('README.md', 'sh')
    script = replaced(block.text, {'127.0.0.1:PORT': tiny_stack.address, 'tml-...': tenant_key})
    output = '\n'.join(checkout.sh(script))
    assert 'twinkle.api.model.v1.TrainingService' in output


def test_commands_for_a_remote_server_answer(tiny_stack: StackState, tenant_key: str, checkout: Checkout) -> None:
    """Commands need only the address and a key in the environment; for plaintext, they need no authority."""
    exports, commands = blocks_of('docs/do/remote-server.md', 'sh')
    authority = next(line for line in exports.text.splitlines(keepends=True) if 'TWINKLE_CA' in line)
    values = {'https://train.example:8000': tiny_stack.address, 'tml-...': tenant_key, authority: ''}
    output = checkout.sh(replaced(exports.text, values) + commands.text)
    assert len(output) > 1


@pytest.mark.slow
def test_commands_for_a_remote_server_answer_over_tls(tmp_path: Path, checkout: Checkout) -> None:
    """The same commands work over TLS if the folder has the private authority's certificate."""
    model = build_tiny_model(tmp_path / 'model', family='qwen3')
    options = StackOptions(state_dir=tmp_path / 'secure', base_model=str(model), engine='torch', tls=True)
    stack = start_stack(options, report=lambda *_: None)
    try:
        exports, commands = blocks_of('docs/do/remote-server.md', 'sh')
        assert stack.ca is not None
        (checkout.folder / 'ca.crt').write_bytes(Path(stack.ca).read_bytes())
        values = {'https://train.example:8000': stack.url, 'tml-...': stack.read_api_key()}
        output = checkout.sh(replaced(exports.text, values) + commands.text)
    finally:
        stop_stack(options.state_dir, report=lambda *_: None)
    assert len(output) > 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize('page', PAGES_OF_COMMANDS)
def test_commands_of_a_tutorial_run_the_functions_that_it_shows(page: str, checkout: Checkout) -> None:
    """Each command succeeds and prints the output on the page, and every function on the page is entered."""
    script = shortened(''.join(block.text for block in blocks_of(page, 'sh')))
    if start := START.search(script):
        with running(checkout, start[1]):
            output = checkout.sh(START.sub('', script), records_calls=True)
    else:
        output = checkout.sh(script, records_calls=True)
    expected = printed_output(page)
    assert output[len(output) - len(expected) :] == expected
    entered = checkout.calls()
    shown = {f'{file} {name}' for block in blocks_of(page, 'include') for file, name in block.included}
    # A constant is not a function. Its module runs if another function of the page is in the module.
    functions = {item for item in shown if not item.rpartition(' ')[2].isupper()}
    assert [item for item in functions if not any(f'{call}.'.startswith(f'{item}.') for call in entered)] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_the_readme_run_in_one_session(checkout: Checkout) -> None:
    """Examples use the services that `./run twinkle up` starts with the built-in model, until `down` stops them."""
    commands, _, recipes = blocks_of('README.md', 'sh')
    readme = (checkout.folder / 'README.md').read_text()
    start, loop = './run twinkle up', '.venv/bin/python -m examples.sft_in_20_lines'
    assert f'`{start}`' in readme
    assert f'`{loop}`' in readme
    with running(checkout, start) as process:
        output = '\n'.join(checkout.sh(loop))
        assert 'twinkle://' in output
        checkout.sh(shortened(recipes.text))
        output = '\n'.join(checkout.sh(commands.text))
        assert DOCUMENTED_MODEL in output.lower()
        process.wait(timeout=60)
