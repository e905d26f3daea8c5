"""Imports at run time: no torch in light packages, and only the standard library in domains and rules."""

import json
import re
import subprocess
import sys

from fixtures.source_tree import imported_names, modules

HEAVY = {'datasets', 'megatron', 'pandas', 'peft', 'ray', 'torch', 'transformers', 'vllm'}
"""Libraries that light packages, such as the client and the gateway, never load."""
TORCH_FREE = [
    'twinkle_services.checkpoint.__main__',
    'twinkle_services.data.__main__',
    'twinkle_services.gateway.__main__',
    'twinkle_services.model.__main__',
    'twinkle_services.model.config',
    'twinkle_services.sampler.config',
    'twinkle',
    'twinkle.advantage',
    'twinkle.api',
    'twinkle.checkpoint_engine',
    'twinkle.data_format',
    'twinkle.dataloader',
    'twinkle.dataset',
    'twinkle.hub',
    'twinkle.infra',
    'twinkle.preprocessor',
    'twinkle.rollout',
    'twinkle.reward',
    'twinkle.template',
    'twinkle.tracking',
    'twinkle_client',
    'twinkle_client.cli',
]
VALUES = (
    'numpy',
    'twinkle_services.kit.caller',
    'twinkle_services.kit.clock',
    'twinkle_services.kit.errors',
    'twinkle_services.kit.names',
    'twinkle_services.kit.ids',
    'twinkle.data_format',
)
"""Packages that a domain may import in addition to the standard library: values and arrays."""

GATEWAY_RULES = re.compile(r'twinkle_services\.gateway\.(credentials|errors|paging|fleet\.sampler_choice|\w+\.rules)')
"""Modules that the rules of a gateway feature may also import: shared values, and rules of other features."""

PROBE = """
import importlib, json, sys
heavy, found, seen = set(json.loads(sys.argv[1])), {}, set()
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
    loaded = heavy & set(sys.modules)
    if loaded - seen:
        found[name] = sorted(loaded - seen)
    seen |= loaded
print(json.dumps(found))
"""
"""A program that prints each heavy library with the first module whose import loads it."""


def test_light_modules_load_no_heavy_library() -> None:
    """Importing all light packages in a new interpreter loads no heavy library."""
    probe = subprocess.run(
        [sys.executable, '-c', PROBE, json.dumps(sorted(HEAVY)), json.dumps(TORCH_FREE)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert probe.returncode == 0, probe.stderr
    assert json.loads(probe.stdout) == {}


def test_domains_import_only_the_standard_library() -> None:
    """Domains and rules import only each other, the standard library and values."""
    offenders: list[str] = []
    for module in modules('services/'):
        package = '.'.join(module.name.split('.')[:3])
        if not package.endswith('.domain') and not module.name.endswith('.rules'):
            continue
        offenders += [
            f'{module.path}:{line}: {name}'
            for line, name in imported_names(module.tree)
            if name.split('.')[0] not in sys.stdlib_module_names
            and not name.startswith((package, *VALUES))
            and not GATEWAY_RULES.fullmatch(name)
        ]
    assert offenders == []


def test_services_are_imported_by_their_installed_name() -> None:
    """No module imports the folder `services`, whose classes would be duplicates of those in `twinkle_services`."""
    offenders = [
        f'{module.path}:{line}: {name}'
        for module in modules()
        for line, name in imported_names(module.tree)
        if name.split('.')[0] == 'services'
    ]
    assert offenders == []
