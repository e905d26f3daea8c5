"""The messages of Tinker's protobuf bodies: `tinker.proto` is ours to edit, its stubs are made by `./run gen`."""

__all__ = ['tinker_pb2']
