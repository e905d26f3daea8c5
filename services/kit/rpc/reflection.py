"""Server reflection, with which programs without generated code list the services and read their contracts.

grpcio-reflection implements version v1alpha only. Version v1, which newer clients try first, differs in the name of its
package, so the same servicer answers both. Use the library's v1 once it has one.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

_V1ALPHA = reflection.SERVICE_NAME
_V1 = _V1ALPHA.replace('v1alpha', 'v1')
_METHOD = 'ServerReflectionInfo'


def add_reflection(services: Iterable[str], handlers: Any) -> None:
    """Serve reflection of `services`, of health and of reflection itself in both versions.

    Args:
        services: Full names of the services, whose generated modules are imported.
        handlers: Object with the methods of a `grpc.aio.Server` that add handlers.
    """
    _add_v1_descriptor()
    # `enable_server_reflection` would add the synchronous servicer, because `handlers` is no server of grpc.aio.
    servicer: Any = reflection.aio.ReflectionServicer({*services, health.SERVICE_NAME, _V1, _V1ALPHA})
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, handlers)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_V1, {_METHOD: method}),))


def _add_v1_descriptor() -> None:
    """Describe version v1 in the default pool, unless it is described there."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(_V1)
    except KeyError:
        described = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(described)
        renamed = text_format.MessageToString(described).replace('v1alpha', 'v1')
        pool.AddSerializedFile(text_format.Parse(renamed, FileDescriptorProto()).SerializeToString())
