"""Tests of the settings of CPU libraries that keep the rows of a product independent."""

import os

from twinkle.nn.cpu_products import has_independent_rows


def test_rows_of_products_are_independent() -> None:
    """Rows of a float32 product do not depend on the number of rows."""
    assert has_independent_rows()


def test_child_processes_do_not_inherit_the_setting() -> None:
    """The environment variable is set only while the library reads it."""
    assert 'MKL_CBWR' not in os.environ
