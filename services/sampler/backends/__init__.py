"""Implementations of the ports: the torch and vLLM engines, the sources of weights, and the fleet's gateways."""

__all__: list[str] = []
