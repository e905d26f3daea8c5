"""The checkpoint service: passes versions of weights from trainers to samplers, and stores durable checkpoints.

`python -m twinkle_services.checkpoint` starts it. `twinkle.checkpoint_engine` defines the format of a state, and
`twinkle_services.kit.weights.wire` is the client that trainers and samplers use.
"""

__all__: list[str] = []
