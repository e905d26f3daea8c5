"""Reads the contracts of `protos/` with their comments."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import cast

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

PACKAGE_PREFIX = 'twinkle.api.'

# Numbers of fields in descriptor.proto, which form the paths of comments.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED_MESSAGES, _NESTED_ENUMS, _ONEOFS = 2, 3, 4, 8
_MEMBERS = 2
"""Values of an enum, and methods of a service."""


@dataclass(frozen=True)
class Contract:
    """A file of `protos/`."""

    file: FileDescriptorProto

    @property
    def noun(self) -> str:
        """Noun of the package, such as `model`."""
        return self.file.package.removeprefix(PACKAGE_PREFIX).partition('.')[0]

    @cached_property
    def _comments(self) -> Mapping[Sequence[int], str]:
        locations = self.file.source_code_info.location
        return {tuple(location.path): location.leading_comments.strip() for location in locations}

    def comment(self, *path: int) -> str:
        """Return the comment of the element at a path of field numbers and indices."""
        return ' '.join(self._comments.get(path, '').split())

    def services(self) -> Iterator[tuple[ServiceDescriptorProto, tuple[int, ...]]]:
        """Yield the services with their paths."""
        for index, service in enumerate(self.file.service):
            yield service, (_SERVICES, index)

    def messages(self) -> Iterator[tuple[str, DescriptorProto, tuple[int, ...]]]:
        """Yield the messages with their names and paths; a nested message follows its parent."""
        for index, message in enumerate(self.file.message_type):
            yield from _with_nested(message.name, message, (_MESSAGES, index))

    def enums(self) -> Iterator[tuple[str, EnumDescriptorProto, tuple[int, ...]]]:
        """Yield the enums with their names and paths."""
        for index, enum in enumerate(self.file.enum_type):
            yield enum.name, enum, (_ENUMS, index)
        for name, message, path in self.messages():
            for index, enum in enumerate(message.enum_type):
                yield f'{name}.{enum.name}', enum, (*path, _NESTED_ENUMS, index)

    def field_comment(self, message: tuple[int, ...], index: int) -> str:
        """Return the comment of a message's field."""
        return self.comment(*message, _FIELDS, index)

    def oneof_comment(self, message: tuple[int, ...], index: int) -> str:
        """Return the comment of a message's oneof."""
        return self.comment(*message, _ONEOFS, index)

    def member_comment(self, parent: tuple[int, ...], index: int) -> str:
        """Return the comment of a method of a service, or of a value of an enum."""
        return self.comment(*parent, _MEMBERS, index)


def read_contracts(proto_root: Path) -> list[Contract]:
    """Compile all contracts below a folder, and return them sorted by path.

    Raises:
        RuntimeError: The compiler refused a contract and printed the reason.
    """
    names = [path.relative_to(proto_root).as_posix() for path in sorted((proto_root / 'twinkle').rglob('*.proto'))]
    roots = [proto_root, proto_root / 'third_party', resources.files('grpc_tools') / '_proto']
    with tempfile.TemporaryDirectory(prefix='twinkle-docs-') as folder:
        output = Path(folder) / 'contracts.binpb'
        options = [*(f'--proto_path={root}' for root in roots), f'--descriptor_set_out={output}']
        if protoc.main(['protoc', *options, '--include_source_info', *names]):
            raise RuntimeError('protoc refused a contract; see its output above')
        return [Contract(file) for file in FileDescriptorSet.FromString(output.read_bytes()).file]


def is_map(field: FieldDescriptorProto, message: DescriptorProto) -> bool:
    """Return whether a field of a message is a map."""
    return map_entry(field, message) is not None


def map_entry(field: FieldDescriptorProto, message: DescriptorProto) -> DescriptorProto | None:
    """Return the nested message with key and value of a map; None for other fields."""
    name = field.type_name.rpartition('.')[2]
    entries = [nested for nested in message.nested_type if nested.options.map_entry and nested.name == name]
    return entries[0] if entries else None


def type_name(field: FieldDescriptorProto) -> str:
    """Return the type of a field: a scalar such as `int64`, or the full name of a message or enum."""
    if field.type_name:
        return field.type_name.removeprefix('.')
    return FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()


def is_in_oneof(field: FieldDescriptorProto) -> bool:
    """Return whether a field is one of several alternatives."""
    return field.HasField('oneof_index') and not field.proto3_optional


def _with_nested(
    name: str, message: DescriptorProto, path: tuple[int, ...]
) -> Iterator[tuple[str, DescriptorProto, tuple[int, ...]]]:
    yield name, message, path
    for index, nested in enumerate(cast('Sequence[DescriptorProto]', message.nested_type)):
        if not nested.options.map_entry:
            yield from _with_nested(f'{name}.{nested.name}', nested, (*path, _NESTED_MESSAGES, index))
