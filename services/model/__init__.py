"""The model service: trains many tenants' adapters on one shared base model.

Rooms: `api` converts, `application` orders and records operations, `domain` holds the values
and the order of operations, `backends` hosts the engine and reaches the checkpoint service.
"""

__all__: list[str] = []
