"""The model service trains adapters of many tenants on one shared base model.

`api` converts messages, `application` orders and records operations, and `domain` contains values and rules. `backends`
runs the engine, stores the journal, and calls the checkpoint and data services.
"""

__all__: list[str] = []
