"""Example calls of each method in Python, TypeScript and for `buf curl`.

A request has values for the fields whose comment contains "Required", and for one alternative of a required oneof.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, MethodDescriptorProto

from docs.site.contracts import Contract, is_in_oneof, is_map, type_name

_TEXTS = {
    'adapter_id': 'ad-1m7ys3redsbca5z8cggetr',
    'base_model': 'smollm2-135m-instruct',
    'checkpoint_path': 'twinkle://ad-1m7ys3redsbca5z8cggetr/weights/final',
    'digest': 'af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262',
    'hub_token': 'hf_...',
    'preprocessor': 'AlpacaProcessor',
    'request_id': 'request-1',
    'run_id': 'ad-1m7ys3redsbca5z8cggetr',
    'target': 'hf://me/my-adapter',
    'trace_id': 'dbf032913647ce8984a12f3236bbcdda',
}
"""Example values of fields by name; other strings are the name of the field."""
_TOKENS = {'dtype': 'DTYPE_INT32', 'shape': [1]}
_PROMPT = {'chat': {'trajectory': {'messages': [{'role': 'ROLE_USER', 'parts': [{'text': 'Who are you?'}]}]}}}
_MESSAGES: Mapping[str, tuple[object, object]] = {
    'google.protobuf.Duration': ({'seconds': 30}, '30s'),
    'google.protobuf.Empty': ({}, {}),
    'twinkle.api.sampler.v1.Prompt': (_PROMPT, _PROMPT),
    'twinkle.api.tensor.v1.Tensor': ({**_TOKENS, 'data': b'\x01\0\0\0'}, {**_TOKENS, 'data': 'AQAAAA=='}),
}
"""Example values of messages in Python and in JSON, if required fields alone would give no useful example."""
_FIRST_CHOICES = {'twinkle.api.model.v1.Operation.verb': 'step'}
"""Alternatives of required oneofs in examples. For other oneofs, examples set the first alternative."""
_LITERAL_WIDTH = 60
"""Length above which a nested value is written on several lines."""
_LINE_WIDTH = 78
"""Number of characters in a line of code that fits next to the outline of a page in a window of 1280 pixels."""
_REQUIRED = re.compile(r'\b(Required|at least one|Exactly one)\b')


class ExampleCalls:
    """Writes example calls for the methods of all contracts."""

    def __init__(self, contracts: list[Contract]) -> None:
        self._messages = {
            f'{contract.file.package}.{name}': (contract, message, path)
            for contract in contracts
            for name, message, path in contract.messages()
        }
        self._enums = {
            f'{contract.file.package}.{name}': enum for contract in contracts for name, enum, _ in contract.enums()
        }

    def request(self, message: str, *, is_json: bool) -> dict[str, object]:
        """Return an example of a message by field; JSON has camel-case names and strings for durations."""
        contract, descriptor, path = self._messages[message]
        value: dict[str, object] = {}
        for index, field in enumerate(descriptor.field):
            if _is_given(contract, descriptor, path, index):
                name = field.json_name if is_json else field.name
                item = self._value(field, is_json=is_json)
                value[name] = [item] if field.label == field.LABEL_REPEATED else item
        return value

    def python(self, contract: Contract, service: str, method: MethodDescriptorProto) -> str:
        """Return a program with the generated stubs."""
        folder = contract.file.package
        module = contract.file.name.rpartition('/')[2].removesuffix('.proto') + '_pb2'
        fields = self.request(method.input_type.removeprefix('.'), is_json=False)
        arguments = [f'{name}={_literal(value, repr, "    ")}' for name, value in fields.items()]
        begin = f'request = {module}.{method.input_type.rpartition(".")[2]}('
        joined = ', '.join(arguments)
        if len(begin + joined) > _LINE_WIDTH:
            joined = '\n    ' + ',\n    '.join(arguments) + ',\n'
        sent = 'iter([request])' if method.client_streaming else 'request'
        call = f'{service}Stub(channel).{method.name}({sent}, metadata=key)'
        received = [f'    for response in {call}:', '        print(response)']
        return '\n'.join(
            [
                'import os',
                '',
                'import grpc',
                f'from {folder} import {module}',
                f'from {folder}.{module}_grpc import {service}Stub',
                '',
                "key = [('authorization', f'Bearer {os.environ[\"TWINKLE_API_KEY\"]}')]",
                f'{begin}{joined})',
                "with grpc.insecure_channel(os.environ['TWINKLE_SERVER_URL']) as channel:",
                *(received if method.server_streaming else [f'    print({call})']),
            ]
        )

    def typescript(self, contract: Contract, service: str, method: MethodDescriptorProto) -> str:
        """Return a program with the package for TypeScript."""
        path = contract.file.name.removesuffix('.proto').removeprefix('twinkle/')
        name = method.name[0].lower() + method.name[1:]
        body = _literal(self.request(method.input_type.removeprefix('.'), is_json=True), json.dumps)
        message = method.input_type.rpartition('.')[2]
        request = '(async function* () { yield request; })()' if method.client_streaming else 'request'
        call = f'client.service({service}).{name}({request})'
        received = [f'for await (const response of {call}) console.log(response);']
        return '\n'.join(
            [
                "import { fromJson } from '@bufbuild/protobuf';",
                "import { TwinkleClient } from 'twinkle-grpc';",
                f"import {{ {message}Schema, {service} }} from 'twinkle-grpc/{path}_pb';",
                '',
                'const client = new TwinkleClient();',
                f'const request = fromJson({message}Schema, {body});',
                *(received if method.server_streaming else [f'console.log(await {call});']),
                'client.close();',
            ]
        )

    def curl(self, contract: Contract, service: str, method: MethodDescriptorProto) -> str:
        """Return a command for a plaintext gateway; the gateway's reflection describes the messages."""
        body = json.dumps(self.request(method.input_type.removeprefix('.'), is_json=True))
        return '\n'.join(
            [
                'buf curl --http2-prior-knowledge --protocol grpc \\',
                '  -H "authorization: Bearer $TWINKLE_API_KEY" \\',
                f"  -d '{body}' \\",
                f'  "http://$TWINKLE_SERVER_URL/{contract.file.package}.{service}/{method.name}"',
            ]
        )

    def _value(self, field: FieldDescriptorProto, *, is_json: bool) -> object:
        kind = type_name(field)
        if kind in _MESSAGES:
            return _MESSAGES[kind][is_json]
        if kind in self._messages:
            return self.request(kind, is_json=is_json)
        if kind in self._enums:
            return self._enums[kind].value[1].name
        if kind == 'bytes':
            return 'AAAAAA==' if is_json else b'\0\0\0\0'
        if kind == 'string':
            return _TEXTS.get(field.name, f'my-{field.name.removesuffix("_id")}')
        # proto3 JSON writes 64-bit integers as strings.
        is_text = is_json and kind.endswith('64')
        return {'bool': True, 'double': 0.5, 'float': 0.5}.get(kind, '1' if is_text else 1)


def _literal(value: Any, scalar: Callable[[Any], str], indent: str = '') -> str:
    """Return a nested value as a literal, on several lines if long; `scalar` writes names, numbers and strings."""
    if not isinstance(value, dict | list) or len(scalar(value)) < _LITERAL_WIDTH:
        return scalar(value)
    inner = f'{indent}    '
    if isinstance(value, list):
        items = [_literal(item, scalar, inner) for item in cast('list[Any]', value)]
        return '[' + f'\n{inner}' + f',\n{inner}'.join(items) + f',\n{indent}]'
    pairs = cast('dict[str, Any]', value).items()
    items = [f'{scalar(name)}: {_literal(item, scalar, inner)}' for name, item in pairs]
    return '{' + f'\n{inner}' + f',\n{inner}'.join(items) + f',\n{indent}}}'


def _is_given(contract: Contract, message: DescriptorProto, path: tuple[int, ...], index: int) -> bool:
    """Return whether an example sets the field."""
    field = message.field[index]
    if is_in_oneof(field):
        names = [item.name for item in message.field if is_in_oneof(item) and item.oneof_index == field.oneof_index]
        oneof = f'{contract.file.package}.{message.name}.{message.oneof_decl[field.oneof_index].name}'
        is_required = bool(_REQUIRED.search(contract.oneof_comment(path, field.oneof_index)))
        return is_required and field.name == _FIRST_CHOICES.get(oneof, names[0])
    return not is_map(field, message) and bool(_REQUIRED.search(contract.field_comment(path, index)))


def methods_of(contracts: list[Contract]) -> Iterator[tuple[Contract, str, MethodDescriptorProto]]:
    """Yield each method with its contract and its service."""
    for contract in contracts:
        for service, _ in contract.services():
            for method in service.method:
                yield contract, service.name, method
