"""The model service on the wire: servicers, and conversion with every input check."""

__all__: list[str] = []
