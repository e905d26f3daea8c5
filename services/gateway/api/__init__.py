"""The edge: contracts in, domain values out. All input checks are in `convert`; forwarding knows bytes alone."""

__all__: list[str] = []
