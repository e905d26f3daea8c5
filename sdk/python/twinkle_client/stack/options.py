"""What a stack is made of, and the configuration file that says so."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml

SERVICES = ('checkpoint', 'data', 'model', 'sampler', 'gateway')
"""In the order of their starts: each needs only those before it."""
ENGINES = ('auto', 'torch', 'vllm')
"""What may sample: `auto` is vLLM where it is installed, else torch."""
_MAPPINGS = ('patches', *SERVICES)
"""Keys of the file whose values are mappings."""
_SCALARS: Mapping[str, tuple[type, str]] = {
    'base_model': (str, 'a text'),
    'more_models': (list, 'a list of texts'),
    'listen': (str, 'a text'),
    'http_listen': (str, 'a text'),
    'engine': (str, 'a text'),
    'sampler_count': (int, 'a whole number'),
    'tls': (bool, 'true or false'),
}
"""Keys of the file whose values are not, with their types and what to call them."""
DEFAULT_MODEL = 'smollm2-135m-instruct'


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """What to start."""

    state_dir: Path
    base_model: str = DEFAULT_MODEL
    more_models: tuple[str, ...] = ()
    """Further base models; each has a model service and samplers of its own."""
    listen: str = '127.0.0.1:0'
    """The gateway's address; the others take a free loopback port."""
    http_listen: str = '127.0.0.1:0'
    """Where the gateway speaks HTTP, for OpenAI's clients; empty: nowhere."""
    engine: str = 'auto'
    """What samples, one of `ENGINES`."""
    sampler_count: int = 1
    """Sampler processes of each base model to begin with."""
    tls: bool = False
    """Whether clients and services speak TLS, with certificates made in the state folder."""
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Changes to the base model as trainer and sampler load it: options by name, in order."""
    services: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Fields of each service's own configuration, beside those the stack sets."""

    def __post_init__(self) -> None:
        """Refuse what cannot be started.

        Raises:
            ValueError: names the option.
        """
        if self.engine not in ENGINES:
            raise ValueError(f'engine must be one of {", ".join(ENGINES)}, got {self.engine!r}')
        if self.sampler_count < 0:
            raise ValueError(f'sampler_count must be at least 0, got {self.sampler_count}')
        if not all(isinstance(name, str) and name for name in self.more_models):  # pyright: ignore[reportUnnecessaryIsInstance] (a file may hold anything)
            raise ValueError('more_models must be a list of texts')
        if len(set(self.base_models)) < len(self.base_models):
            raise ValueError('more_models names a base model twice')
        if self.patches and self.more_models:
            raise ValueError('patches are of one base model; give them to a stack of its own')
        if self.patches and self.engine == 'vllm':
            raise ValueError('patches change the model of the torch engine only; set engine to torch')

    @property
    def base_models(self) -> tuple[str, ...]:
        """All base models, in the order of their services."""
        return self.base_model, *self.more_models

    @property
    def resolved_engine(self) -> str:
        """What samples: 'torch' or 'vllm'."""
        if self.engine != 'auto':
            return self.engine
        return 'vllm' if importlib.util.find_spec('vllm') and not self.patches else 'torch'

    def with_file(self, path: Path) -> 'StackOptions':
        """Return these options with those of a YAML file over them.

        The file may have `base_model`, `more_models`, `listen`, `http_listen`, `engine`, `sampler_count`, `tls`,
        `patches`, and a mapping for each service.

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
        known = {*_SCALARS, *_MAPPINGS}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f'{path}: unknown keys {unknown}; known are {sorted(known)}')
        for name, value in values.items():
            wanted, called = _SCALARS.get(name, (Mapping, 'a mapping'))
            if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
                raise ValueError(f'{path}: {name} must be {called}, got {value!r}')
        services = {name: values[name] for name in SERVICES if name in values}
        scalars = {name: values[name] for name in _SCALARS if name in values}
        if 'more_models' in scalars:
            scalars['more_models'] = tuple(scalars['more_models'])
        try:
            return replace(self, **scalars, patches=values.get('patches', self.patches), services=services)
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from None
