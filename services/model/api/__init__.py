"""gRPC servicers of the model service, and conversion of messages with all input checks."""

__all__: list[str] = []
