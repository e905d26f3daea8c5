"""Use cases of the model service. They access other systems through ports, and import neither protos nor torch."""

__all__: list[str] = []
