"""A hub for the user programs, a stack that serves its models, and a function that runs a program."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fixtures.seed_hub import build_seed_hub
from fixtures.seed_programs import LOCAL_MODELS, MODELS, RunProgram
from fixtures.seed_programs import run_program as run
from fixtures.tinker_sdk import running_stack, tracebacks
from twinkle_client.stack import StackState


@pytest.fixture(scope='session')
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a local hub."""
    names = [name.removeprefix('ms://') for name in (*MODELS, *LOCAL_MODELS)]
    return build_seed_hub(tmp_path_factory.mktemp('hub'), names)


@pytest.fixture(scope='session')
def stack(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Running stack that serves the hub's models. At the end, its logs must not contain a traceback."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv('TWINKLE_HUB_DIR', str(hub))
        folder = tmp_path_factory.mktemp('stack')
        with running_stack(folder, *MODELS) as state:
            yield state
        assert tracebacks(folder) == []


@pytest.fixture
def run_program(hub: Path, tmp_path: Path) -> RunProgram:
    """Function that runs a program in a new folder with the local hub."""
    return partial(run, folder=tmp_path, hub=hub)
