"""Reference pages of the public Python names, which mkdocstrings fills from the docstrings."""

import ast
from pathlib import Path

ROOTS = {'twinkle': 'The component library', 'twinkle_client': 'The client'}
"""Packages with public names, and the titles of their lists."""
_LEFT_OUT = {'twinkle.api', 'twinkle_client.cli', 'twinkle_client.convert'}
"""Generated stubs, the command line, and conversions that only the client uses."""
_WITH_BASES = {'twinkle.dataset', 'twinkle.model', 'twinkle.rollout', 'twinkle.sampler', 'twinkle_client.model'}
"""Packages whose classes are divided among bases that are not public, so that inherited methods must be shown."""


def library_pages(sdk: Path) -> dict[str, str]:
    """Return a page for each package with public names, and a list of them, by their path on the site."""
    pages: dict[str, str] = {}
    rows = ['# Python reference', '', 'Public names of each package, from their docstrings.', '']
    for root, title in ROOTS.items():
        rows += [f'## {title}', '', '| package | contents |', '| --- | --- |']
        for name, tree in _packages(sdk, root):
            page = f'reference/python/{name}.md'
            names = public_names(tree)
            pages[page] = _page(name, names)
            summary = (ast.get_docstring(tree) or '').split('\n\n')[0].replace('\n', ' ')
            rows.append(f'| [{name}]({name}.md) | {summary} |')
        rows.append('')
    return {'reference/python/index.md': '\n'.join(rows), **pages}


def public_names(tree: ast.Module) -> list[str]:
    """Return the names of `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
            return list(ast.literal_eval(node.value))
    return []


def _packages(sdk: Path, root: str) -> list[tuple[str, ast.Module]]:
    """Return the package and those directly below it that have public names."""
    files = [sdk / root / '__init__.py', *sorted((sdk / root).glob('*/__init__.py'))]
    packages = {'.'.join(file.parent.relative_to(sdk).parts): ast.parse(file.read_text('utf-8')) for file in files}
    return [(name, tree) for name, tree in packages.items() if name not in _LEFT_OUT and public_names(tree)]


def _page(package: str, names: list[str]) -> str:
    members = ''.join(f'        - {name}\n' for name in names if not name.startswith('_'))
    inherited = f'      inherited_members: {str(package in _WITH_BASES).lower()}\n'
    options = f'    options:\n      show_root_heading: false\n{inherited}      members:\n{members}'
    return f'# {package}\n\n[All packages](index.md)\n\n::: {package}\n{options}'
