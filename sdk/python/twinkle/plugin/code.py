"""The code of a plugin, read once: its digest is of what was read, and what was read is what runs.

Whatever else lies in the folder is never run: what changed since, what a link leads to, what was compiled before.
"""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from twinkle.hub import PLUGIN_FILES
from twinkle.plugin.errors import PluginRefused

_SUFFIXES = frozenset(pattern.removeprefix('*') for pattern in PLUGIN_FILES)
_COMPILED = frozenset({'.pyc', '.pyd', '.so'})
_CACHE = '__pycache__'


@dataclass(frozen=True, eq=False)
class PluginCode:
    """What a plugin is made of."""

    folder: Path
    files: Mapping[str, bytes]
    """Content by path within the folder, with slashes; sorted by path."""

    @classmethod
    def read(cls, folder: Path) -> 'PluginCode':
        """Read a plugin's folder.

        Raises:
            PluginRefused: it holds compiled code, which nobody can read and no hub is asked for, or a link to a
                folder, whose code would be none of its own.
        """
        paths = sorted(folder.rglob('*'))
        for path in paths:
            if path.is_symlink() and path.is_dir():
                raise PluginRefused(str(folder), f'holds a link to a folder ({path.name}); put the files there')
            # Python leaves compiled files of its own there; they are not run.
            if path.suffix in _COMPILED and not (path.parent.name == _CACHE and path.suffix == '.pyc'):
                raise PluginRefused(str(folder), f'holds compiled code ({path.name}); a plugin is made of Python files')
        own = [path for path in paths if path.suffix in _SUFFIXES and path.is_file()]
        return cls(folder, {path.relative_to(folder).as_posix(): path.read_bytes() for path in own})

    @property
    def digest(self) -> str:
        """The sha256 of all of it, names and contents, as hexadecimal digits."""
        digest = hashlib.sha256()
        for name, content in self.files.items():
            for part in (name.encode(), content):
                digest.update(len(part).to_bytes(8, 'big') + part)
        return digest.hexdigest()

    def spec(self, package: str, name: str) -> ModuleSpec | None:
        """Return how a module is loaded; None where there is none.

        Args:
            package: name under which the plugin runs.
            name: of the module, `package` itself or one within it.
        """
        place = '/'.join(name.split('.')[1:])
        file = f'{place}/__init__.py'.lstrip('/')
        if file not in self.files and f'{place}.py' in self.files:
            return self._spec_of(name, f'{place}.py')
        if file in self.files:
            return self._spec_of(name, file)
        if place and any(other.startswith(f'{place}/') for other in self.files):
            folder = ModuleSpec(name, None, is_package=True)
            folder.submodule_search_locations = [str(self.folder / place)]
            return folder
        return None

    def _spec_of(self, name: str, file: str) -> ModuleSpec | None:
        path = self.folder / file
        places = [str(path.parent)] if path.name == '__init__.py' else None
        return spec_from_file_location(name, path, loader=_Loader(self, path), submodule_search_locations=places)


class _Loader(SourceLoader):
    """Runs one module from what was read."""

    def __init__(self, code: PluginCode, path: Path) -> None:
        self._code, self._path = code, path

    def get_filename(self, fullname: str) -> str:
        """Return where the module was read, for tracebacks."""
        del fullname
        return str(self._path)

    def get_data(self, path: str) -> bytes:
        """Return what was read of a file.

        Raises:
            OSError: nothing was; so it is with compiled code, which is looked for first.
        """
        name = Path(path).relative_to(self._code.folder).as_posix()
        if name not in self._code.files:
            raise OSError(f'{name} is not part of the plugin')
        return self._code.files[name]


class PluginFinder(MetaPathFinder):
    """Finds the modules of plugins, and keeps Python from looking for them in their folders."""

    def __init__(self) -> None:
        self._codes: dict[str, PluginCode] = {}

    def add(self, package: str, code: PluginCode) -> ModuleSpec:
        """Have modules of `package` found in `code`; return how the package itself is loaded.

        Raises:
            PluginRefused: it has no `__init__.py`.
        """
        spec = code.spec(package, package)
        if spec is None or spec.loader is None:
            raise PluginRefused(str(code.folder), 'its __init__.py cannot be loaded')
        self._codes[package] = code
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return spec

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a module of a plugin is loaded; None for modules of others.

        Raises:
            ModuleNotFoundError: the plugin has no such module.
        """
        package = fullname.partition('.')[0]
        if package not in self._codes:
            return None
        spec = self._codes[package].spec(package, fullname)
        if spec is None:
            raise ModuleNotFoundError(f'the plugin has no module {fullname.partition(".")[2]}', name=fullname)
        return spec
