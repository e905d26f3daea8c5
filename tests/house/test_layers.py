"""The interceptors run in an order that maps, logs, counts and traces every refusal."""

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
    """Interceptors that refuse calls run inside those that map, log, count and trace them."""
    layers = server_layers(
        cast(Any, None), is_supported=lambda method: True, default_timeouts={}, message_limit_bytes=1
    )
    assert [cast(Any, layer).__name__ for layer in layers] == ORDER
