"""Tests that the generators of other languages get the options and files that they need from protos/ alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message

from fixtures.source_tree import ROOT
from twinkle_services.kit.errors import ChunkCorrupt, DomainError, InvalidField, QueueFull, QuotaExceeded
from twinkle_services.kit.rpc.status import status_from_error

BUF = Path(sys.executable).parent / 'buf'
RECORDER = """
import json, sys
from google.protobuf.compiler import plugin_pb2
from google.protobuf.json_format import MessageToDict
request = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
options = {file.name: MessageToDict(file.options) for file in request.proto_file}
content = json.dumps({'generated': list(request.file_to_generate), 'options': options})
response = plugin_pb2.CodeGeneratorResponse(supported_features=1)
response.file.add(name='options.json', content=content)
sys.stdout.buffer.write(response.SerializeToString())
"""
"""A plugin that writes the options of all files instead of code."""
CONTRACTS = sorted(
    path.relative_to(ROOT / 'protos').as_posix() for path in (ROOT / 'protos' / 'twinkle').rglob('*.proto')
)
GOOGLE_GO = 'google.golang.org/genproto/googleapis/rpc/'


def _recorded(language: str, folder: Path) -> dict[str, Any]:
    """Run the configuration of an example with the recorder as its only plugin, and return what it wrote."""
    settings = yaml.safe_load((ROOT / 'examples' / language / 'buf.gen.yaml').read_text())
    (folder / 'recorder.py').write_text(RECORDER)
    plugin = {'local': [sys.executable, str(folder / 'recorder.py')], 'out': '.', 'strategy': 'all'}
    template = json.dumps({**settings, 'plugins': [plugin]})
    command = [BUF, 'generate', '--template', template, '--output', folder]
    subprocess.run(command, cwd=ROOT / 'examples' / language, check=True)
    return json.loads((folder / 'options.json').read_text())


def _package(path: str) -> list[str]:
    """Return the parts of a contract's package."""
    return path.split('/')[:-1]


@pytest.mark.parametrize(
    ('language', 'expected'),
    [
        ('go', lambda parts: {'goPackage': f'example.com/client/gen/{"/".join(parts)};{parts[-2]}{parts[-1]}'}),
        ('java', lambda parts: {'javaPackage': f'com.{".".join(parts)}', 'javaMultipleFiles': True}),
        ('csharp', lambda parts: {'csharpNamespace': '.'.join(part.capitalize() for part in parts)}),
        # protoc derives the modules of Ruby from the packages.
        ('ruby', lambda _: {}),
    ],
)
def test_each_contract_has_the_options_of_a_language(language: str, expected: Any, tmp_path: Path) -> None:
    """The example's configuration generates every contract, with a package of the language for each folder."""
    recorded = _recorded(language, tmp_path)
    assert sorted(recorded['generated']) == CONTRACTS
    for path in CONTRACTS:
        assert recorded['options'][path].items() >= expected(_package(path)).items()
    assert recorded['options']['google/rpc/status.proto']['goPackage'].startswith(GOOGLE_GO)


@pytest.fixture(scope='module')
def pool(tmp_path_factory: pytest.TempPathFactory) -> DescriptorPool:
    """A pool with the contracts and the files next to them, and nothing from installed packages."""
    image = tmp_path_factory.mktemp('image') / 'image.binpb'
    subprocess.run([BUF, 'build', '--as-file-descriptor-set', '--output', image], cwd=ROOT, check=True)
    built = DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file:
        built.AddSerializedFile(file.SerializeToString())
    return built


@pytest.mark.parametrize(
    ('error', 'names'),
    [
        (ChunkCorrupt(7), {'ErrorInfo'}),
        (InvalidField('chunk.sha256', 'is wrong'), {'ErrorInfo', 'BadRequest'}),
        (QueueFull(queue_length=1, queue_limit=1), {'ErrorInfo', 'RetryInfo'}),
        (QuotaExceeded('uploads', 16), {'ErrorInfo', 'QuotaFailure'}),
    ],
)
def test_error_details_are_decoded_with_the_contracts(
    pool: DescriptorPool, error: DomainError, names: set[str]
) -> None:
    """The details of each refusal are messages of protos/third_party, so every language can generate and read them."""
    details = {any_.TypeName(): any_.value for any_ in status_from_error(error).details}
    assert set(details) == {f'google.rpc.{name}' for name in names}
    decoded = {name: _decode(pool, name, value) for name, value in details.items()}
    assert str(decoded['google.rpc.ErrorInfo'].reason) == error.reason
    assert all(value.ByteSize() for value in decoded.values())


def _decode(pool: DescriptorPool, name: str, value: bytes) -> Message:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name)).FromString(value)
