"""The model service trains adapters of many tenants on one shared base model.

`api` converts messages, `application` orders and records operations, `domain` contains values and rules, and `backends`
runs the engine and calls the checkpoint and data services.
"""

__all__: list[str] = []
