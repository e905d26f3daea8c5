"""Links in documents resolve, and shipped configurations load."""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml

from fixtures.source_tree import ROOT, tracked_files
from twinkle_client.cli.app import app
from twinkle_client.stack import StackOptions
from twinkle_services.kit.config import ServiceConfig, load_config

LINK = re.compile(r'\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+"[^"]*")?\)')
FENCE = re.compile(r'^(```|~~~).*?^\1', re.MULTILINE | re.DOTALL)
MARKDOWN = [path for path in tracked_files() if path.endswith('.md')]
CONFIGS = [path for path in tracked_files() if re.fullmatch(r'deploy/config/\w+\.yaml', path)]
"""Shipped configurations, each named after its service."""


@pytest.mark.parametrize('path', MARKDOWN)
def test_every_link_resolves(path: str) -> None:
    """Every relative link leads to a file of the repository, and every anchor to a heading."""
    text = FENCE.sub('', (ROOT / path).read_text())
    broken = [target for target in LINK.findall(text) if not _resolves(target, (ROOT / path))]
    assert broken == []


def test_each_decision_has_a_number() -> None:
    """Every file of docs/adr has a unique number."""
    numbers = [Path(path).name[:4] for path in MARKDOWN if path.startswith('docs/adr/')]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize('path', CONFIGS)
def test_every_configuration_loads(path: str) -> None:
    """Each file of deploy/config is a valid configuration of its service."""
    service = Path(path).stem
    module = importlib.import_module(f'twinkle_services.{service}.config')
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, ServiceConfig)]
    (kind,) = [kind for kind in kinds if kind.__module__ == module.__name__ and kind.service == service]
    assert load_config(kind, ['--config', str(ROOT / path)]).service == service


def test_stack_of_the_manifest_for_kuberay_starts(tmp_path: Path) -> None:
    """The configuration in the manifest is valid, and so are the options of `twinkle up` in its job."""
    documents = list(yaml.safe_load_all((ROOT / 'deploy/kuberay.yaml').read_text()))
    config, job = (next(item for item in documents if item['kind'] == kind) for kind in ('ConfigMap', 'RayJob'))
    file = tmp_path / 'stack.yaml'
    file.write_text(config['data']['stack.yaml'])
    options = StackOptions(state_dir=tmp_path).with_file(file)
    assert set(options.resources) == {'model', 'sampler'}
    command = shlex.split(job['spec']['entrypoint'])[-1].replace('/etc/twinkle/stack.yaml', str(file))
    words = shlex.split(command.partition('exec twinkle up')[2])
    up = cast('Any', typer.main.get_command(app)).commands['up']
    assert up.make_context('up', words).params['config'] == file


def test_continuous_integration_installs_the_documented_packages() -> None:
    """`.ci/run` installs the packages in docs/languages.md, except Node.js, which the Python environment contains."""
    documented = [_installed_packages(line) for line in _commands(ROOT / 'docs/languages.md')]
    installed = [_installed_packages(line) for line in _commands(ROOT / '.ci/run')]
    expected = set[str]().union(*documented) - {'nodejs', 'npm'}
    assert expected
    assert expected in installed


def _commands(file: Path) -> list[str]:
    """Return the lines of a file, in which continued lines are one line."""
    return file.read_text().replace('\\\n', ' ').splitlines()


def _installed_packages(command: str) -> set[str]:
    """Return the packages that `apt-get install` in a command installs."""
    words = command.partition('apt-get install')[2].split()
    return {word for word in words if not word.startswith('-')}


def _resolves(target: str, source: Path) -> bool:
    if re.match(r'[a-z][a-z0-9+.-]*:', target):
        return True
    name, _, anchor = target.partition('#')
    file = (source.parent / name).resolve() if name else source
    if not file.exists() or not file.is_relative_to(ROOT):
        return False
    return not anchor or file.suffix != '.md' or anchor in _anchors(file.read_text())


def _anchors(text: str) -> set[str]:
    headings = re.findall(r'^#{1,6}\s+(.*?)\s*#*$', FENCE.sub('', text), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}
