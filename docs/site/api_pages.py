"""Reference pages of the contracts: one page per package, and a list of all methods."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    MethodDescriptorProto,
)

from docs.site.calls import ExampleCalls, methods_of
from docs.site.client_names import callers
from docs.site.contracts import PACKAGE_PREFIX, Contract, is_in_oneof, map_entry, type_name
from twinkle_services.gateway.credentials import Access, Requirement, requirement_of

CLIENT = Path('sdk/python/twinkle_client')
"""Folder of the client."""
_SCOPES: Mapping[Requirement, str] = {
    Access.ANY_KEY: 'any valid key',
    Access.INTERNAL: 'none: only services of the deployment call it',
}
_INTRODUCTION = """# {title}

Package `twinkle.api.{noun}.v1`. [All methods](index.md) lists the other packages, and describes how to call them.

"""
_INDEX = """# All methods

The gateway serves these methods over gRPC with reflection. Send the API key as `authorization: Bearer <key>`. A method
needs a key with the scope in the table ([tenants](../../tenants.md)). Failed calls have one of the
[error reasons](../errors.md).

The examples read the address and the key from the environment; `twinkle up` prints both:

```sh
export TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-...
```

The Python examples use the stubs in the package `twinkle-grpc`, and the TypeScript examples the npm package of the same
name, for which [TypeScript](../../typescript.md) describes errors, retries and TLS:

```sh
npm install twinkle-grpc @bufbuild/protobuf
```

The curl examples use `buf curl` of the [Buf CLI](https://buf.build/docs/cli/), which sends JSON as gRPC:

```sh
pip install buf-bin
```

`grpcurl -plaintext -H ... -d ... "$TWINKLE_SERVER_URL" SERVICE/METHOD` accepts the same headers and data. For plain
HTTP, the gateway has [OpenAI's API](../../openai.md) and [the Tinker API](../../tinker.md).

With TLS, use a secure channel, or `https://` without `--http2-prior-knowledge` and with `--cacert`
([security](../../security.md)).

"""


@dataclass(frozen=True)
class ApiPages:
    """Writes the reference pages.

    Args:
        contracts: All contracts.
        root: Root folder of the repository.
    """

    contracts: list[Contract]
    root: Path

    def pages(self) -> Mapping[str, str]:
        """Return the Markdown of each page by its path on the site."""
        nouns = sorted({contract.noun for contract in self.contracts})
        pages = {f'reference/api/{noun}.md': self._package(noun) for noun in nouns}
        return {'reference/api/index.md': self._index(), **pages}

    @cached_property
    def _callers(self) -> Mapping[str, list[str]]:
        return callers(self.root / CLIENT)

    def _index(self) -> str:
        rows = ['| method | scope | meaning |', '| --- | --- | --- |']
        for contract, service, method in methods_of(self.contracts):
            meaning = _first_sentence(self._method_comment(contract, service, method.name))
            link = f'[{service}.{method.name}]({contract.noun}.md#{_anchor(service, method.name)})'
            rows.append(f'| {link} | {_scope(contract, service, method.name)} | {_cell(meaning, "")} |')
        return _INDEX + '\n'.join(rows) + '\n'

    def _package(self, noun: str) -> str:
        contracts = [contract for contract in self.contracts if contract.noun == noun]
        lines = [line for contract in contracts for line in self._services(contract)]
        lines += ['## Messages', '']
        for contract in contracts:
            for name, message, path in contract.messages():
                lines += _message(contract, name, message, path)
            for name, enum, path in contract.enums():
                lines += _enum(contract, name, enum, path)
        return _INTRODUCTION.format(title=noun.capitalize(), noun=noun) + '\n'.join(lines)

    def _services(self, contract: Contract) -> Iterator[str]:
        """Yield the sections of a contract's services and their methods."""
        calls, deadlines = ExampleCalls(self.contracts), _deadlines(self.root)
        for service, path in contract.services():
            yield from (f'## {service.name}', '', _text(contract.comment(*path), contract.noun), '')
            for index, method in enumerate(service.method):
                name = f'{service.name}/{method.name}'
                yield from (f'### {method.name} {{ #{_anchor(service.name, method.name)} }}', '')
                yield from (_text(contract.member_comment(path, index), contract.noun), '')
                known = (self._callers.get(name, []), deadlines.get(name, ''))
                yield from _facts(contract, service.name, method, known)
                if requirement_of(f'{contract.file.package}.{name}') is not Access.INTERNAL:
                    yield from _tabs(calls, contract, service.name, method)

    def _method_comment(self, contract: Contract, service: str, method: str) -> str:
        for descriptor, path in contract.services():
            for index, item in enumerate(descriptor.method):
                if (descriptor.name, item.name) == (service, method):
                    return contract.member_comment(path, index)
        raise LookupError(f'{service}.{method} is not in {contract.file.name}')


def contract_pages(proto_root: Path) -> dict[str, str]:
    """Return the page that describes each contract, and the folder of all contracts, by path in the repository."""
    root = proto_root.parent
    folder = proto_root / 'twinkle' / 'api'
    pages = {
        path.relative_to(root).as_posix(): f'reference/api/{path.relative_to(folder).parts[0]}.md'
        for path in folder.rglob('*.proto')
    }
    pages['protos/twinkle/api/error/v1/error_reason.proto'] = 'reference/errors.md'
    pages[folder.relative_to(root).as_posix()] = 'reference/api/index.md'
    return pages


def _facts(
    contract: Contract, service: str, method: MethodDescriptorProto, found: tuple[list[str], str]
) -> Iterator[str]:
    """Yield a list with the messages, the scope, the deadline and the callers in the client."""
    client, deadline = found
    sent, received = (_type_link(kind.removeprefix('.'), contract) for kind in (method.input_type, method.output_type))
    yield f'- Request: {"a stream of " if method.client_streaming else ""}{sent}'
    yield f'- Response: {"a stream of " if method.server_streaming else ""}{received}'
    yield f'- Scope: {_scope(contract, service, method.name)}'
    if deadline:
        yield f'- Deadline of the Python client: {deadline}'
    if client:
        yield f'- In the Python client: {", ".join(f"`{name}`" for name in client)}'
    yield ''


def _tabs(calls: ExampleCalls, contract: Contract, service: str, method: MethodDescriptorProto) -> Iterator[str]:
    programs = {
        ('Python', 'python'): calls.python(contract, service, method),
        ('TypeScript', 'typescript'): calls.typescript(contract, service, method),
        ('curl', 'sh'): calls.curl(contract, service, method),
    }
    for (title, language), program in programs.items():
        yield f'=== "{title}"'
        yield ''
        yield f'    ```{language}'
        yield from (f'    {line}'.rstrip() for line in program.splitlines())
        yield '    ```'
        yield ''


def _message(contract: Contract, name: str, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
    yield f'### {name} {{ #{_anchor(name)} }}'
    yield ''
    yield _text(contract.comment(*path), contract.noun)
    yield ''
    if not message.field:
        return
    yield '| field | type | meaning |'
    yield '| --- | --- | --- |'
    for index, field in enumerate(message.field):
        kind, comment = _field_type(contract, message, field), contract.field_comment(path, index)
        yield f'| `{field.name}` | {kind} | {_cell(comment, contract.noun)} |'
    yield ''
    for index, oneof in enumerate(message.oneof_decl):
        names = [f'`{field.name}`' for field in message.field if is_in_oneof(field) and field.oneof_index == index]
        if names:
            comment = _text(contract.oneof_comment(path, index), contract.noun)
            yield f'`{oneof.name}` is one of {", ".join(names)}. {comment}'
            yield ''


def _enum(contract: Contract, name: str, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
    yield f'### {name} {{ #{_anchor(name)} }}'
    yield ''
    yield _text(contract.comment(*path), contract.noun)
    yield ''
    yield '| value | number | meaning |'
    yield '| --- | --- | --- |'
    for index, value in enumerate(enum.value):
        yield f'| `{value.name}` | {value.number} | {_cell(contract.member_comment(path, index), contract.noun)} |'
    yield ''


def _field_type(contract: Contract, message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = map_entry(field, message)
    if entry is not None:
        key, value = (_type_link(type_name(item), contract) for item in entry.field)
        return f'map of {key} to {value}'
    kind = _type_link(type_name(field), contract)
    if field.label == field.LABEL_REPEATED:
        return f'list of {kind}'
    return f'optional {kind}' if field.proto3_optional else kind


def _type_link(name: str, contract: Contract) -> str:
    """Return a scalar type, or a link to a message or enum."""
    if not name.startswith(PACKAGE_PREFIX):
        return f'`{name}`'
    noun, _, short = name.removeprefix(PACKAGE_PREFIX).partition('.v1.')
    page = '' if noun == contract.noun else f'{noun}.md'
    return f'[{short}]({page}#{_anchor(short)})'


def _scope(contract: Contract, service: str, method: str) -> str:
    requirement = requirement_of(f'{contract.file.package}.{service}/{method}')
    if requirement is None:
        raise LookupError(f'{service}.{method} has no scope; add it to services/gateway/credentials.py')
    return _SCOPES.get(requirement, f'`{requirement.value}`')


def _deadlines(root: Path) -> dict[str, str]:
    """Return the deadlines of `service_config.json` by `Service/Method`."""
    file = root / 'sdk/python/twinkle/api/service_config.json'
    entries: list[Any] = json.loads(file.read_text(encoding='utf-8'))['methodConfig']
    return {
        f'{name["service"].rpartition(".")[2]}/{name["method"]}': entry['timeout'].replace('s', ' s')
        for entry in entries
        for name in entry['name']
        if 'timeout' in entry and 'method' in name
    }


def _anchor(*names: str) -> str:
    return '-'.join(names).replace('.', '-').lower()


def _first_sentence(text: str) -> str:
    return re.split(r'(?<=[.]) (?=[A-Z])', text, maxsplit=1)[0]


def _text(comment: str, noun: str) -> str:
    """Return a comment as Markdown: tags are escaped, and error reasons are links."""
    parts = re.split(r'(`[^`]*`)', comment)
    plain = [part if part.startswith('`') else part.replace('<', '&lt;').replace('[', '\\[') for part in parts]
    if noun == 'error':
        return ''.join(plain)
    return re.sub(r'\bERROR_REASON_(\w+)', lambda match: reason_link(match[1], '../errors.md'), ''.join(plain))


def _cell(comment: str, noun: str) -> str:
    return _text(comment, noun).replace('|', '\\|')


def reason_link(reason: str, page: str) -> str:
    """Return a link to an error reason on the page of errors."""
    return f'[{reason}]({page}#{reason.lower()})'
