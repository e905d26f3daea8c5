"""The messages of Tinker's protobuf bodies. Edit `tinker.proto`; `./run gen` generates its stubs."""

__all__ = ['tinker_pb2']
