"""What may be loaded where: no torch in the light half, only the standard library in domains."""

import json
import re
import subprocess
import sys

from fixtures.source_tree import imported_names, modules

HEAVY = {'datasets', 'megatron', 'pandas', 'peft', 'ray', 'torch', 'transformers', 'vllm'}
"""Libraries that a client, the gateway and their like must never load."""
TORCH_FREE = [
    'services.checkpoint.__main__',
    'services.data.__main__',
    'services.gateway.__main__',
    'services.model.config',
    'services.sampler.config',
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
    'twinkle_client',
    'twinkle_client.cli',
]
VALUES = (
    'numpy',
    'services.kit.caller',
    'services.kit.clock',
    'services.kit.errors',
    'services.kit.names',
    'services.kit.ids',
    'twinkle.data_format',
)
"""What a domain may know beside the standard library: values (arrays among them), never machines."""

GATEWAY_RULES = re.compile(r'services\.gateway\.(credentials|errors|paging|fleet\.routing|\w+\.rules)')
"""What the rules of a gateway feature may import beside that: root values and the rules of other features."""

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


def test_light_modules_load_no_heavy_library() -> None:
    """A fresh interpreter that imports the light half of the project has loaded no heavy library."""
    probe = subprocess.run(
        [sys.executable, '-c', PROBE, json.dumps(sorted(HEAVY)), json.dumps(TORCH_FREE)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert probe.returncode == 0, probe.stderr
    assert json.loads(probe.stdout) == {}


def test_domains_know_only_the_standard_library() -> None:
    """A domain imports itself, the standard library and values."""
    offenders: list[str] = []
    for module in modules('services/'):
        room = '.'.join(module.name.split('.')[:3])
        if not room.endswith('.domain') and not module.name.endswith('.rules'):
            continue
        offenders += [
            f'{module.path}:{line}: {name}'
            for line, name in imported_names(module.tree)
            if name.split('.')[0] not in sys.stdlib_module_names
            and not name.startswith((room, *VALUES))
            and not GATEWAY_RULES.fullmatch(name)
        ]
    assert offenders == []
