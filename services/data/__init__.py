"""The data service: datasets made, changed and kept; batches streamed as fast as they are asked for.

`python -m services.data` starts it. What a dataset, a template and a loader do is
`twinkle.dataset`, `twinkle.template` and `twinkle.dataloader`; this service adds tenants,
persistence, idempotency and flow control.
"""

__all__: list[str] = []
