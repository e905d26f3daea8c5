"""Values and rules of sampling.

The modules import only the standard library, numpy, data formats and the kit's errors.
"""

__all__: list[str] = []
