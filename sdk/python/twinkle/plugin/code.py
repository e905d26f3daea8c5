"""The code of a plugin.

The files are read once, and both the digest and the imports use the bytes that were read. Later changes of the files
have no effect. Plugins with linked folders or compiled code are refused.
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
    """Files of a plugin."""

    folder: Path
    files: Mapping[str, bytes]
    """File contents by relative path with forward slashes, sorted by path."""

    @classmethod
    def read(cls, folder: Path) -> 'PluginCode':
        """Read a plugin's folder.

        Raises:
            PluginRefused: the folder contains compiled code, which cannot be reviewed, or a link to another folder.
        """
        paths = sorted(folder.rglob('*'))
        for path in paths:
            if path.is_symlink() and path.is_dir():
                raise PluginRefused(
                    str(folder), f'contains a link to a folder ({path.name}); copy the files into the plugin'
                )
            # Python's bytecode cache is allowed, but never run.
            if path.suffix in _COMPILED and not (path.parent.name == _CACHE and path.suffix == '.pyc'):
                raise PluginRefused(
                    str(folder), f'contains compiled code ({path.name}); a plugin may contain Python source only'
                )
        files = [path for path in paths if path.suffix in _SUFFIXES and path.is_file()]
        return cls(folder, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files})

    @property
    def digest(self) -> str:
        """SHA-256 over the names and contents of all files, as hexadecimal digits."""
        digest = hashlib.sha256()
        for name, content in self.files.items():
            for part in (name.encode(), content):
                digest.update(len(part).to_bytes(8, 'big') + part)
        return digest.hexdigest()

    def spec(self, name: str) -> ModuleSpec | None:
        """Return the import spec of a module, or None if the plugin does not contain the module.

        Args:
            name: full module name, beginning with the name under which the plugin is imported.
        """
        stem = '/'.join(name.split('.')[1:])
        file = f'{stem}/__init__.py'.lstrip('/')
        if file not in self.files and f'{stem}.py' in self.files:
            return self._spec_of(name, f'{stem}.py')
        if file in self.files:
            return self._spec_of(name, file)
        if stem and any(other.startswith(f'{stem}/') for other in self.files):
            folder = ModuleSpec(name, None, is_package=True)
            folder.submodule_search_locations = [str(self.folder / stem)]
            return folder
        return None

    def _spec_of(self, name: str, file: str) -> ModuleSpec | None:
        path = self.folder / file
        locations = [str(path.parent)] if path.name == '__init__.py' else None
        return spec_from_file_location(name, path, loader=_Loader(self, path), submodule_search_locations=locations)


class _Loader(SourceLoader):
    """Loads one module from the stored bytes."""

    def __init__(self, code: PluginCode, path: Path) -> None:
        self._code, self._path = code, path

    def get_filename(self, fullname: str) -> str:
        """Return the path of the module's file, for tracebacks."""
        del fullname
        return str(self._path)

    def get_data(self, path: str) -> bytes:
        """Return the stored content of a file.

        Raises:
            OSError: the file is not stored. Bytecode, which Python requests first, is never stored.
        """
        name = Path(path).relative_to(self._code.folder).as_posix()
        if name not in self._code.files:
            raise OSError(f'{name} is not part of the plugin')
        return self._code.files[name]


class PluginFinder(MetaPathFinder):
    """Import hook for modules of plugins. Python would otherwise import the modules from their folders."""

    def __init__(self) -> None:
        self._codes: dict[str, PluginCode] = {}

    def add(self, package: str, code: PluginCode) -> ModuleSpec:
        """Make the modules of `package` importable from `code`, and return the spec of the package itself.

        Raises:
            PluginRefused: the plugin has no `__init__.py`.
        """
        spec = code.spec(package)
        if spec is None or spec.loader is None:
            raise PluginRefused(str(code.folder), 'has no __init__.py that can be loaded')
        self._codes[package] = code
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        return spec

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a plugin's module, or None if `fullname` is not in a plugin.

        Raises:
            ModuleNotFoundError: the plugin does not contain the module.
        """
        package = fullname.partition('.')[0]
        if package not in self._codes:
            return None
        spec = self._codes[package].spec(fullname)
        if spec is None:
            raise ModuleNotFoundError(f'the plugin has no module {fullname.partition(".")[2]}', name=fullname)
        return spec
