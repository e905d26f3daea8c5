"""What runs in processes of its own behind walls: each file is a program that knows the standard library alone.

They are started by path, so that nothing of this library is loaded where a model's text is worked on.
"""

__all__: list[str] = []
