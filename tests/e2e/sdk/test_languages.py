"""The programs of examples/ in several languages, built from the contracts, against stacks with and without TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.example_programs import (
    PROGRAMS,
    ExampleProgram,
    build_program,
    check_features,
    run_program,
    variables_of,
)
from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope='module')
def secure_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Running stack with TLS, whose certificates are those of `twinkle certs`."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')
    folder = tmp_path_factory.mktemp('secure')
    options = StackOptions(state_dir=folder, base_model=str(model), engine='torch', tls=True)
    yield start_stack(options, report=lambda *_: None)
    stop_stack(folder, report=lambda *_: None)


@pytest.fixture(scope='module', params=PROGRAMS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ExampleProgram, Path]:
    """A program of a language, and the folder in which it is built."""
    program = PROGRAMS[request.param]
    return program, build_program(program, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize('stack_name', ['tiny_stack', 'secure_stack'])
def test_program_trains_and_samples(
    built: tuple[ExampleProgram, Path], stack_name: str, request: pytest.FixtureRequest
) -> None:
    """A program uses each kind of call, reads the details of an error, and ends calls by deadline and cancellation."""
    stack: StackState = request.getfixturevalue(stack_name)
    check_features(run_program(*built, variables_of(stack)), stack.base_model)


@pytest.mark.parametrize('language', PROGRAMS)
def test_documentation_names_the_packages_of_a_program(language: str) -> None:
    """The page about languages names every package of Debian that a program needs."""
    words = (ROOT / 'docs' / 'languages.md').read_text().replace('`', ' ').split()
    assert set(PROGRAMS[language].packages) <= set(words)
