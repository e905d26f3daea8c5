"""Reads files of untrusted callers: memory is charged before allocation, and files beyond the limits are refused.

The library `datasets` decodes a file before its size is known, so it reads files only in processes (`hub_process.py`).
"""

from twinkle_services.data.backends.bounded.files import bounded_rows
from twinkle_services.data.backends.bounded.json_files import rows_of_lines

__all__ = ['bounded_rows', 'rows_of_lines']
