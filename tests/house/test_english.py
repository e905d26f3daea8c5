"""Tests of wording: forbidden phrases, missing docstrings and commit subjects."""

import ast
import subprocess
from pathlib import Path

import pytest

from fixtures.prose import SUFFIXES, findings_in
from fixtures.source_tree import ROOT, functions, modules, tracked_files

NOT_OURS = ('/third_party/',)
RULES = {'tests/fixtures/prose.py', 'tests/fixtures/imperatives.txt', 'tests/house/test_english.py'}
"""Files that quote the phrases which they forbid."""
SUBJECT_LENGTH = 72
LAST_UNCHECKED_COMMIT = '2adb4dd'
"""The last commit before the rule for subjects."""


def test_prose_has_no_private_idiom() -> None:
    """Comments, docstrings, messages and documents use none of the phrases that `fixtures/prose.py` forbids."""
    offenders = [
        str(finding)
        for path in tracked_files()
        if Path(path).suffix in SUFFIXES or path == 'run'
        if path not in RULES and not any(part in path for part in NOT_OURS)
        if '_pb2' not in path and not path.startswith('sdk/python/twinkle/api/')
        for finding in findings_in(path, (ROOT / path).read_text())
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ('path', 'text', 'rule'),
    [
        ('a.py', '# Whoever waits is told.', 'mark'),
        ('a.py', 'raise ValueError("there is nobody to ask")', 'mark'),
        ('a.py', 'def read():\n    """As in the order."""', 'opening'),
        ('a.py', 'LIMIT = 3\n"""Of its share."""', 'opening'),
        ('a.py', 'def read():\n    """The record."""', 'imperative'),
        ('a.py', 'def test_it():\n    """By their kind."""', 'opening'),
        ('a.py', 'def test_it():\n    """Both are equal."""', 'short'),
        ('a.md', 'What waits is served.', 'mark'),
        ('a.proto', '// The bytes come back to the bit.', 'mark'),
    ],
)
def test_each_rule_finds_its_phrase(path: str, text: str, rule: str) -> None:
    """Every rule of the wording check reports its example."""
    assert rule in {finding.rule for finding in findings_in(path, text)}


@pytest.mark.parametrize(
    ('path', 'text'),
    [
        ('a.py', 'class Read:\n    @property\n    def size(self):\n        """Size in bytes."""'),
        ('a.py', 'def read():\n    """Return the record."""'),
        ('a.md', '## What is supported\n\nEverything.'),
        ('a.md', 'What is a future? It is a request with an id.'),
    ],
)
def test_plain_sentences_are_accepted(path: str, text: str) -> None:
    """Noun phrases for properties, imperative verbs, headings and questions pass the wording check."""
    assert findings_in(path, text) == []


def test_every_test_states_its_fact() -> None:
    """Every test function has a docstring."""
    offenders = [
        f'{module.path}: {name}'
        for module in modules('tests/')
        for name, function in functions(module)
        if function.name.startswith('test_') and Path(module.path).name.startswith('test_')
        if ast.get_docstring(function) is None
    ]
    assert offenders == []


def test_every_verb_of_a_protocol_is_documented() -> None:
    """Every public method of a public Protocol has a docstring."""
    offenders = [
        f'{module.path}: {node.name}.{method.name}'
        for module in modules('services/', 'sdk/')
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith('_')
        if any(ast.unparse(base).split('[')[0] == 'Protocol' for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith('_')
        if not method.decorator_list and ast.get_docstring(method) is None
    ]
    assert offenders == []


def test_commit_subjects_are_short() -> None:
    """Every commit subject after `LAST_UNCHECKED_COMMIT` has at most 72 characters and starts with '['."""
    known = subprocess.run(
        ['git', 'merge-base', '--is-ancestor', LAST_UNCHECKED_COMMIT, 'HEAD'],
        cwd=ROOT,
        check=False,
        capture_output=True,
    )
    span = [f'{LAST_UNCHECKED_COMMIT}..HEAD'] if known.returncode == 0 else ['-1']
    command = ['git', 'log', '--no-merges', '--format=%s', *span]
    subjects = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line for line in subjects if len(line) > SUBJECT_LENGTH or not line.startswith('[')] == []
