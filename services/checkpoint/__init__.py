"""The checkpoint service: versions of weights from trainers to samplers, and durable checkpoints.

`python -m services.checkpoint` starts it. What a state is and how it is packed is
`twinkle.checkpoint_engine`; how trainers and samplers reach it is `services.kit.rpc.weights`.
"""

__all__: list[str] = []
