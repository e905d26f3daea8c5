"""Options of a stack and its configuration file."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml

from twinkle.data_format import base_model_id
from twinkle_client.stack.scaling_rule import Scaling, scaling_of
from twinkle_client.stack.sections import check_sections, suggestion

SERVICES = ('checkpoint', 'data', 'model', 'sampler', 'gateway')
"""Services in start order; each depends only on earlier services."""
PLACED = ('model', 'sampler')
"""Services that a Ray cluster places by resources. Other services run on the machine that starts the stack."""
ENGINES = ('auto', 'torch', 'vllm')
"""Sampler engines; `auto` selects vLLM if it is installed and can run the model, otherwise torch."""
DTYPES = ('auto', 'float32', 'bfloat16', 'float16')
"""Data types of base models; with `auto`, each service selects one by the stored model and its device."""
_MAPPINGS = ('patches', 'resources', 'autoscaling', *SERVICES)
"""Keys of the configuration file whose values are mappings."""
_SCALARS: Mapping[str, tuple[type, str]] = {
    'base_model': (str, 'a string'),
    'more_models': (list, 'a list of strings'),
    'listen': (str, 'a string'),
    'http_listen': (str, 'a string'),
    'engine': (str, 'a string'),
    'dtype': (str, 'a string'),
    'trainer_count': (int, 'an integer'),
    'sampler_count': (int, 'an integer'),
    'tls': (bool, 'true or false'),
    'min_free_bytes': (int, 'an integer'),
    'full_parameters': (bool, 'true or false'),
    'ray_address': (str, 'a string'),
}
"""All other keys of the configuration file, with the type of the value and its name in messages."""
DEFAULT_MODEL = base_model_id('smollm2-135m-instruct')


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def check_resources(resources: Mapping[str, Any]) -> None:
    """Check the resources of services on a Ray cluster.

    Raises:
        ValueError: A service is not placed by resources, or its resources are empty or not a mapping of names to
            positive numbers.
    """
    for service, given in resources.items():
        if service not in PLACED:
            raise ValueError(f'resources.{service}: only {" and ".join(PLACED)} are placed by resources')
        if not isinstance(given, Mapping):
            raise ValueError(f'resources.{service}: must be a mapping such as {{GPU: 1}}, got {given!r}')
        if not given:
            raise ValueError(f'resources.{service}: must name at least one resource')
        for kind, number in cast(Mapping[str, Any], given).items():
            if not isinstance(number, int | float) or isinstance(number, bool) or number <= 0:
                raise ValueError(f'resources.{service}.{kind}: must be a positive number, got {number!r}')


def _is_recurrent(base_model: str) -> bool:
    """Return whether a base model in a local folder has layers of linear attention."""
    try:
        config = json.loads((Path(base_model).expanduser() / 'config.json').read_bytes())
        return 'linear_attention' in config.get('text_config', config).get('layer_types', ())
    except (OSError, ValueError, AttributeError, TypeError):
        # The services report an unusable folder.
        return False


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """Options of a stack."""

    state_dir: Path
    base_model: str = DEFAULT_MODEL
    more_models: tuple[str, ...] = ()
    """Additional base models; each has separate model services and samplers."""
    listen: str = '127.0.0.1:0'
    """gRPC address of the gateway. The other services use free ports. The default is a free port on loopback, or, on
    a Ray cluster, on the address of this machine."""
    http_listen: str = '127.0.0.1:0'
    """HTTP address of the gateway, for OpenAI and Tinker clients. The default is a free port, as for `listen`. Empty:
    no HTTP."""
    engine: str = 'auto'
    """Sampler engine, one of `ENGINES`."""
    dtype: str = 'auto'
    """Data type of the base models in model services and samplers, one of `DTYPES`. A type in the configuration of the
    model service takes precedence."""
    trainer_count: int = 1
    """Number of model services per base model. A run stays with one model service."""
    sampler_count: int = 1
    """Number of samplers per base model at the start."""
    autoscaling: Scaling | None = None
    """Conditions under which `twinkle up` changes the number of samplers. None: never. `start_stack` ignores it."""
    tls: bool = False
    """Whether clients and services use TLS, with certificates created in the state folder."""
    min_free_bytes: int = 256 << 20
    """Free space that the disk of the state folder must have at the start, for logs, databases and first snapshots."""
    full_parameters: bool = False
    """Whether the model services may train the base model itself."""
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Options of the base model's patches by name. Model services and samplers apply the patches in this order."""
    services: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Additional configuration of each service."""
    ray_address: str = ''
    """Address of the Ray cluster that runs the services, or 'auto' for the running cluster. Empty: this machine,
    without Ray."""
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Ray resources of each process of `model` and `sampler`, by service; see `ray_host.find_cluster`."""

    def __post_init__(self) -> None:
        """Replace the aliases of built-in models with their hub ids, and validate the options.

        Raises:
            ValueError: An option is invalid; the message names it.
        """
        object.__setattr__(self, 'base_model', base_model_id(self.base_model))
        if self.engine not in ENGINES:
            raise ValueError(f'engine must be one of {", ".join(ENGINES)}, got {self.engine!r}')
        if self.dtype not in DTYPES:
            raise ValueError(f'dtype must be one of {", ".join(DTYPES)}, got {self.dtype!r}')
        if self.trainer_count < 1:
            raise ValueError(f'trainer_count must be at least 1, got {self.trainer_count}')
        if self.sampler_count < 0:
            raise ValueError(f'sampler_count must be at least 0, got {self.sampler_count}')
        if not all(isinstance(name, str) and name for name in self.more_models):  # pyright: ignore[reportUnnecessaryIsInstance] (a file may hold anything)
            raise ValueError('more_models must be a list of strings')
        object.__setattr__(self, 'more_models', tuple(map(base_model_id, self.more_models)))
        if len(set(self.base_models)) < len(self.base_models):
            raise ValueError(f'more_models names a base model twice, got {", ".join(self.base_models)}')
        if self.patches and self.more_models:
            raise ValueError('patches cannot be combined with more_models; use a separate stack')
        if self.patches and self.engine == 'vllm':
            raise ValueError('patches require the torch engine; set engine to torch')
        check_resources(self.resources)
        if self.autoscaling is not None:
            self.autoscaling.check(self.sampler_count)

    @property
    def base_models(self) -> tuple[str, ...]:
        """All base models, in the order of their services."""
        return self.base_model, *self.more_models

    def engine_of(self, base_model: str) -> str:
        """Return the engine of a base model's samplers: 'torch' or 'vllm'."""
        if self.engine != 'auto':
            return self.engine
        is_usable = _is_installed('vllm') and not self.patches
        # vLLM's code for models with linear attention imports torchvision, which its CPU build does not require.
        return 'vllm' if is_usable and (_is_installed('torchvision') or not _is_recurrent(base_model)) else 'torch'

    def with_file(self, path: Path) -> 'StackOptions':
        """Return these options, overridden by the options in a YAML file.

        The file may contain `base_model`, `more_models`, `listen`, `http_listen`, `engine`, `dtype`, `trainer_count`,
        `sampler_count`, `tls`, `min_free_bytes`, `full_parameters`, `patches`, `ray_address`, `resources`,
        `autoscaling`, and a mapping for each service.

        Raises:
            ValueError: The file is not a YAML mapping, or a key in it is unknown or has an invalid value.
            OSError: The file cannot be read.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding='utf-8'))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f'{path}: invalid YAML: {error}') from None
        if not isinstance(content, dict):
            raise ValueError(f'{path}: must contain a mapping')
        values = cast(dict[str, Any], content)
        known = {*_SCALARS, *_MAPPINGS}
        unknown = sorted(set(values) - known, key=str)
        if unknown:
            problems = '; '.join(f'{name}: unknown field; {suggestion(str(name), known)}' for name in unknown)
            raise ValueError(f'{path}: {problems}')
        for name, value in values.items():
            kind, kind_text = _SCALARS.get(name, (Mapping, 'a mapping'))
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise ValueError(f'{path}: {name} must be {kind_text}, got {value!r}')
        services = {name: values[name] for name in SERVICES if name in values}
        scalars = {name: values[name] for name in _SCALARS if name in values}
        if 'more_models' in scalars:
            scalars['more_models'] = tuple(scalars['more_models'])
        try:
            check_sections(services)
            mappings = {name: values[name] for name in ('patches', 'resources') if name in values}
            if 'autoscaling' in values:
                mappings['autoscaling'] = scaling_of(values['autoscaling'])
            return replace(self, **scalars, **mappings, services=services)
        except ValueError as error:
            raise ValueError(f'{path}: {error}') from None
