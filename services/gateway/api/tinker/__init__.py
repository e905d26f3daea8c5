"""The Tinker API: its routes, bodies and words, turned into native messages and back.

Its vocabulary stops in this folder: behind it there are adapters, operations, checkpoints and futures. `router`
joins the parts; a part is a class with `routes()`, one file per resource. `dialect` tells errors, `paths` names,
`bodies` reads what clients send, `wire` has the messages of protobuf bodies.
"""

__all__: list[str] = []
