"""The page of configurations, from the fields of each service's configuration class and their docstrings."""

import importlib
import re

from twinkle_services.kit.config import ServiceConfig
from twinkle_services.kit.config_fields import FieldDescription, describe_fields

SERVICES = ('gateway', 'model', 'sampler', 'data', 'checkpoint')
_INTRODUCTION = """# Configuration

A service reads its fields from these sources; later ones override earlier ones:

1. the defaults below,
2. a YAML file: `python -m twinkle_services.model --config model.yaml`,
3. the environment: `TWINKLE_MODEL_MAX_LORA_RANK=64`; a field of a section is joined by two underscores, as in
   `TWINKLE_MODEL_MESH__DP`,
4. the command line: `--set max_lora_rank=64 --set mesh.dp=2`.

Unknown fields and invalid values stop the service with a message that names the field. `python -m
twinkle_services.model
--help-fields` prints the same descriptions as this page. [Deployment](../deployment.md) shows complete files, and
`twinkle up --config` accepts one file with a section per service.

"""


def configuration_page() -> str:
    """Return the page: first the fields that all services share, then those of each service."""
    common = {field.path for field in describe_fields(ServiceConfig)}
    lines = [_INTRODUCTION, '## All services', '', *_table(list(describe_fields(ServiceConfig)))]
    for service in SERVICES:
        config_class = config_class_of(service)
        own = [field for field in describe_fields(config_class) if field.path not in common]
        lines += [f'## {service.capitalize()}', '', f'`python -m twinkle_services.{service}`', '', *_table(own)]
    return '\n'.join(lines)


def config_class_of(service: str) -> type[ServiceConfig]:
    """Return the configuration class of a service."""
    module = importlib.import_module(f'twinkle_services.{service}.config')
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, ServiceConfig)]
    (found,) = [kind for kind in kinds if kind.service == service]
    return found


def _table(fields: list[FieldDescription]) -> list[str]:
    rows = ['| field | type | default | meaning |', '| --- | --- | --- | --- |']
    for field in fields:
        default = field.default if field.default in {'required', 'unset'} else f'`{field.default}`'
        meaning = re.sub(r'\bdocs/([\w-]+\.md)', r'[\1](../\1)', field.explanation)
        rows.append(f'| `{field.path}` | {_cell(field.kind)} | {default} | {_cell(meaning)} |')
    return [*rows, '']


def _cell(text: str) -> str:
    """Escape the text of a table cell outside code."""
    parts = re.split(r'(`[^`]*`)', text)
    escaped = [part if part.startswith('`') else part.replace('<', '&lt;').replace('*', '\\*') for part in parts]
    return ''.join(escaped).replace('|', '\\|')
