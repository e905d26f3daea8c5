"""Conversion of JSON values to messages and back."""

import math
from typing import Any

from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from twinkle_services.kit.rpc.json_values import dict_from_struct, struct_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_structs_keep_json_values(values: dict[str, Any]) -> None:
    """JSON values are unchanged after conversion to a struct and back."""
    assert dict_from_struct(struct_of(values)) == values


def test_numbers_without_a_fraction_become_integers() -> None:
    """Numbers without a fraction become integers, because structs contain doubles only."""
    found = dict_from_struct(struct_of({'a': 3.0, 'b': 3.5, 'c': 1e300, 'd': -0.0}))
    assert {name: type(value) for name, value in found.items()} == {'a': int, 'b': float, 'c': float, 'd': int}
    infinite = Struct()
    infinite.fields['x'].number_value = math.inf
    assert dict_from_struct(infinite) == {'x': math.inf}
