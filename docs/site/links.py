"""Links and included code of pages.

Pages are also read on a forge, where links to files of the repository work. On the site, a link to a file that is no
page becomes a link to `source_url`, or the path of the file if no such address is configured.
"""

import ast
import posixpath
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

LINK = re.compile(r'(!?)\[([^\]]*)\]\(<?([^)\s>]+)>?(?:\s+"([^"]*)")?\)')
CODE_LINE = re.compile(r'^\[[^\]]*\]\((\S+) "code: ([\w., ]+)"\)$', re.MULTILINE)
"""A line with only a link whose title names functions or classes of the file, which the site shows in its place."""
FENCE = re.compile(r'^ *(```+|~~~+).*?^ *\1 *$', re.MULTILINE | re.DOTALL)


class InvalidLink(ValueError):
    """A page links to a file that does not exist, or includes a name that its file does not define."""


class LinkRewriter:
    """Rewrites the links of pages for the site.

    Args:
        root: Root folder of the repository.
        pages: Path in the repository of each page, by its path on the site.
        generated: Page that describes a file or folder, by its path in the repository.
        source_url: Address of a file, with `{path}` for its path; empty if files have no address.
    """

    def __init__(self, root: Path, pages: Mapping[str, str], *, generated: Mapping[str, str], source_url: str) -> None:
        self._root = root
        self._sources = pages
        self._pages = {**generated, **{source: page for page, source in pages.items()}}
        # A folder is represented by its list of pages.
        self._pages |= {posixpath.dirname(source): page for page, source in pages.items() if _is_index(page)}
        self._source_url = source_url

    def rewrite(self, markdown: str, page: str) -> str:
        """Return a page with included code and with links that work on the site.

        Raises:
            InvalidLink: A file, or a name in a file, does not exist.
        """
        folder = posixpath.dirname(self._sources[page])
        included = CODE_LINE.sub(lambda match: self._code(folder, match[1], match[2]), markdown)
        return ''.join(
            text if is_code else LINK.sub(lambda match: self._link(match, page, folder), text)
            for text, is_code in _split(included)
        )

    def _link(self, match: re.Match[str], page: str, folder: str) -> str:
        kind, text, target, title = match.groups()
        name, mark, anchor = target.partition('#')
        if not name or re.match(r'[a-z][a-z0-9+.-]*:', target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, name))
        if path in self._pages:
            relative = posixpath.relpath(self._pages[path], posixpath.dirname(page) or '.')
            suffix = f' "{title}"' if title else ''
            return f'{kind}[{text}]({relative}{mark}{anchor}{suffix})'
        if kind or not (self._root / path).exists():
            raise InvalidLink(f'{self._sources[page]} links to {target!r}, which does not exist; correct the link')
        if self._source_url:
            return f'[{text}]({self._source_url.format(path=path)}{mark}{anchor})'
        return f'`{path}`' if text.strip('`') in {path, name} else f'{text} (`{path}`)'

    def _code(self, folder: str, target: str, names: str) -> str:
        path = posixpath.normpath(posixpath.join(folder, target))
        text = (self._root / path).read_text(encoding='utf-8')
        parts = [definition(path, text, name.strip()) for name in names.split(',')]
        return '\n'.join([f'```python title="{path}"', '\n\n\n'.join(parts), '```'])


def definition(path: str, text: str, name: str) -> str:
    """Return the source of a function, a class, a method (`Class.method`) or an assignment of a module.

    Raises:
        InvalidLink: The module does not define the name.
    """
    body, parts = ast.parse(text).body, name.split('.')
    for index, part in enumerate(parts):
        found = [node for node in body if part in _names_of(node)]
        if not found:
            raise InvalidLink(f'{path} does not define {name!r}; name a function, class or constant of its top level')
        node = found[0]
        if index == len(parts) - 1:
            first = min([node.lineno, *(item.lineno for item in getattr(node, 'decorator_list', ()))])
            return textwrap.dedent('\n'.join(text.splitlines()[first - 1 : node.end_lineno]))
        body = getattr(node, 'body', [])
    raise InvalidLink(f'{path}: a name is missing; write "code: NAME"')


def _names_of(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    targets = [target.id for target in getattr(node, 'targets', ()) if isinstance(target, ast.Name)]
    return [*targets, str(getattr(node, 'name', ''))]


def _is_index(page: str) -> bool:
    return posixpath.basename(page) == 'index.md'


def _split(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a page, and whether each is a block of code."""
    begin = 0
    for match in FENCE.finditer(markdown):
        yield markdown[begin : match.start()], False
        yield match[0], True
        begin = match.end()
    yield markdown[begin:], False
