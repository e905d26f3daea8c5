"""Documents point at things that exist, and shipped configurations load."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from fixtures.source_tree import ROOT, tracked_files

LINK = re.compile(r'\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+"[^"]*")?\)')
FENCE = re.compile(r'^(```|~~~).*?^\1', re.MULTILINE | re.DOTALL)
MARKDOWN = [path for path in tracked_files() if path.endswith('.md')]
CONFIGS = [path for path in tracked_files() if path.startswith('deploy/') and path.endswith(('.yaml', '.yml', '.toml'))]


@pytest.mark.parametrize('path', MARKDOWN)
def test_every_link_resolves(path: str) -> None:
    """Every relative link names a file of the repository, and every anchor a heading."""
    text = FENCE.sub('', (ROOT / path).read_text())
    broken = [target for target in LINK.findall(text) if not _resolves(target, (ROOT / path))]
    assert broken == []


@pytest.mark.parametrize('path', CONFIGS)
def test_every_configuration_parses(path: str) -> None:
    """Each file under deploy/ is well-formed and not empty."""
    text = (ROOT / path).read_text()
    documents = [tomllib.loads(text)] if path.endswith('.toml') else list(yaml.safe_load_all(text))
    assert documents
    assert all(documents)


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
