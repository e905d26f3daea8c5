"""The model service: trains many tenants' adapters on one shared base model.

Layers: `api` converts messages, `application` orders and records operations, `domain` holds values and rules, and
`backends` runs the engine and calls the checkpoint and data services.
"""

__all__: list[str] = []
