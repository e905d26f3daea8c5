"""What a stack is made of, and the configuration file that says so."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml

SERVICES = ('checkpoint', 'data', 'model', 'sampler', 'gateway')
"""In the order of their starts: each needs only those before it."""
_MAPPINGS = ('patches', *SERVICES)
"""Keys of the file whose values are mappings."""
DEFAULT_MODEL = 'smollm2-135m-instruct'


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """What to start."""

    state_dir: Path
    base_model: str = DEFAULT_MODEL
    listen: str = '127.0.0.1:0'
    """The gateway's address; the others take a free loopback port."""
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Changes to the base model as trainer and sampler load it: options by name, in order."""
    services: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Fields of each service's own configuration, beside those the stack sets."""

    def with_file(self, path: Path) -> 'StackOptions':
        """Return these options with those of a YAML file over them.

        The file may have `base_model`, `listen`, `patches`, and a mapping for each service.

        Raises:
            ValueError: it is no mapping, or has a key or value that means nothing.
            OSError: it cannot be read.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding='utf-8'))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f'{path}: is no YAML: {error}') from None
        if not isinstance(content, dict):
            raise ValueError(f'{path}: must be a mapping')
        values = cast(dict[str, Any], content)
        known = {'base_model', 'listen', *_MAPPINGS}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f'{path}: unknown keys {unknown}; known are {sorted(known)}')
        for name, value in values.items():
            wanted, called = (Mapping, 'mapping') if name in _MAPPINGS else (str, 'text')
            if not isinstance(value, wanted):
                raise ValueError(f'{path}: {name} must be a {called}, got {value!r}')
        services = {name: values[name] for name in SERVICES if name in values}
        return replace(
            self,
            base_model=values.get('base_model', self.base_model),
            listen=values.get('listen', self.listen),
            patches=values.get('patches', self.patches),
            services=services,
        )
