"""The order of the interceptors ensures that every refusal is mapped, logged, counted and traced."""

from typing import Any, cast

from twinkle_services.kit.rpc.layers import server_layers

ORDER = [
    'trace_call',
    'count_call',
    'log_call',
    'map_errors',
    'trust',
    'authenticate',
    'name_request',
    'share',
    'refuse_unbuilt_method',
    'bound',
]


def test_interceptors_have_the_documented_order() -> None:
    """Interceptors that can refuse a call run inside the interceptors that map, log, count and trace refusals."""
    layers = server_layers(
        cast(Any, None), is_supported=lambda method: True, default_timeouts={}, message_limit_bytes=1
    )
    assert [cast(Any, layer).__name__ for layer in layers] == ORDER
