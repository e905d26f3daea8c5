"""Programs that run in sandboxed processes and import only the standard library and math-verify.

The programs are started by path, so that the sandboxed process does not import this library.
"""

__all__: list[str] = []
