"""The data service: creates, changes and stores datasets, and streams their batches on demand.

`python -m twinkle_services.data` starts it. Datasets, templates and loaders are implemented by `twinkle.dataset`,
`twinkle.template` and `twinkle.dataloader`. This service adds tenants, persistence, idempotency and flow control.
"""

__all__: list[str] = []
