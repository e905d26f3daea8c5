"""The generated reference pages: complete lists, and examples that fit the contracts."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from docs.site.api_pages import ApiPages
from docs.site.calls import ExampleCalls, methods_of
from docs.site.commands import commands_page
from docs.site.configuration import SERVICES, config_class_of, configuration_page
from docs.site.contracts import Contract, read_contracts
from docs.site.error_page import error_page, messages_by_reason
from docs.site.library import library_pages
from docs.site.metrics import metrics_page
from fixtures.source_tree import ROOT
from twinkle.api.error.v1 import error_reason_pb2
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_services.kit.config_fields import describe_fields
from twinkle_services.kit.telemetry import measures


@pytest.fixture(scope='module')
def contracts() -> list[Contract]:
    """All contracts of the repository."""
    return read_contracts(ROOT / 'protos')


def messages_of(contract: Contract) -> Any:
    """Return the module with a contract's generated messages."""
    return importlib.import_module(contract.file.name.replace('/', '.').removesuffix('.proto') + '_pb2')


def test_each_example_is_a_valid_request(contracts: list[Contract]) -> None:
    """The Python and JSON forms of each method's request are accepted, and are equal messages."""
    calls, different, count = ExampleCalls(contracts), [], 0
    for contract, service, method in methods_of(contracts):
        kind = getattr(messages_of(contract), method.input_type.rpartition('.')[2])
        name, count = method.input_type.removeprefix('.'), count + 1
        message = kind(**calls.request(name, is_json=False))
        if json_format.ParseDict(calls.request(name, is_json=True), kind()) != message:
            different.append(f'{service}.{method.name}')
    assert different == []
    assert count > 80


def test_each_python_example_builds_its_request(contracts: list[Contract]) -> None:
    """The Python program of each method runs up to its call, with the stub of the service."""
    calls = ExampleCalls(contracts)
    for contract, service, method in methods_of(contracts):
        program, _, call = calls.python(contract, service, method).partition('with grpc')
        names: dict[str, Any] = {}
        exec(compile(program.replace('os.environ["TWINKLE_API_KEY"]', '"key"'), method.name, 'exec'), names)
        assert type(names['request']).__name__ == method.input_type.rpartition('.')[2]
        assert f'{service}Stub(channel).{method.name}(' in call
        assert f'{service}Stub' in names


def test_a_curl_example_contains_its_request(contracts: list[Contract]) -> None:
    """The command's data is the request as JSON; a sample's prompt is a chat."""
    calls = ExampleCalls(contracts)
    (found,) = [item for item in methods_of(contracts) if item[2].name == 'Sample']
    command = calls.curl(*found)
    body = json.loads(command.partition("-d '")[2].partition("'")[0])
    assert body['prompt']['chat']['trajectory']['messages'][0]['parts'] == [{'text': 'Who are you?'}]
    assert command.endswith('/twinkle.api.sampler.v1.SamplerService/Sample"')


def test_pages_describe_every_method_with_its_scope(contracts: list[Contract]) -> None:
    """The list has a row for each method; methods that only services call have no examples."""
    pages = ApiPages(contracts, ROOT).pages()
    for contract, service, method in methods_of(contracts):
        anchor = f'{contract.noun}.md#{service}-{method.name}'.lower()
        assert f'[{service}.{method.name}]({anchor})' in pages['reference/api/index.md']
    park = pages['reference/api/model.md'].partition('### ParkAdapter {')[2].partition('\n### ')[0]
    assert 'only services of the deployment' in park
    assert '=== "Python"' not in park
    assert '- Scope: `operator`' in pages['reference/api/model.md'].partition('### TakeOver {')[2][:2000]


def test_pages_name_the_calls_of_the_client(contracts: list[Contract]) -> None:
    """The entry of a method names the function of the Python client that calls it."""
    page = ApiPages(contracts, ROOT).pages()['reference/api/gateway.md']
    keys = page.partition('### CreateKey {')[2].partition('\n### ')[0]
    assert '`twinkle_client.administration.KeyAdministration.create_key`' in keys


def test_each_error_reason_has_a_section(contracts: list[Contract]) -> None:
    """The page has every reason of the contract, with a message if a class declares the reason."""
    page = error_page(contracts, ROOT)
    reasons = [name.removeprefix('ERROR_REASON_') for name in error_reason_pb2.ErrorReason.DESCRIPTOR.values_by_name][
        1:
    ]
    assert re.findall(r'^## (\w+) ', page, re.MULTILINE) == reasons
    assert set(messages_by_reason(ROOT / 'services')) <= set(reasons)
    section = page.partition('## SCOPE_MISSING')[2].partition('\n## ')[0]
    assert '- Python: `AccessError`' in section
    assert 'use a key with this scope' in section


def test_the_configuration_page_has_every_field() -> None:
    """Each field of each service has a row; a field that all services share has only one row."""
    rows = re.findall(r'^\| `([\w.]+)` \|', configuration_page(), re.MULTILINE)
    for service in SERVICES:
        assert {field.path for field in describe_fields(config_class_of(service))} <= set(rows)
    assert rows.count('limits.queue_length') == 1


def test_the_metrics_page_lists_each_metric() -> None:
    """Every metric has one row with its Prometheus name, and a sentence that explains it."""
    names = re.findall(r'^\| `(twinkle_\w+)` \|', metrics_page(), re.MULTILINE)
    assert names == [metric.prometheus_name for metric in measures.all_metrics()]
    assert {'twinkle_rpc_calls_total', 'twinkle_rpc_seconds'} <= set(names)
    assert [metric.name for metric in measures.all_metrics() if not metric.description.endswith('.')] == []


def test_the_commands_page_has_each_command_with_its_options() -> None:
    """Groups of commands have sections, and the help texts list the options."""
    page = commands_page()
    names = re.findall(r'^## (twinkle .*)$', page, re.MULTILINE)
    assert {'twinkle up', 'twinkle fleet drain', 'twinkle checkpoint download'} <= set(names)
    assert '--samplers' in page.partition('## twinkle up\n')[2].partition('\n## ')[0]
    assert '\x1b' not in page


def test_library_pages_name_the_public_names() -> None:
    """Each package has a page with the names of its `__all__`; generated stubs have no page."""
    pages = library_pages(ROOT / 'sdk' / 'python')
    model = pages['reference/python/twinkle_client.model.md']
    assert f'        - {MultiLoraTransformersModel.__name__}\n' in model
    assert not any('twinkle.api' in page for page in pages)
    assert Path('reference/python/twinkle.loss.md').as_posix() in pages
