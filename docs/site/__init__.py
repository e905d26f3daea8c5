"""Generates pages of the documentation site from the code. MkDocs calls `hooks.py`, which calls the other modules."""
