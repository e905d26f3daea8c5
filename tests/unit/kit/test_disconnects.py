"""Calls whose client disconnects while the service writes to them."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from twinkle_services.kit.errors import AdapterNotFound
from twinkle_services.kit.rpc.call import Call, cancelled_if_disconnected
from twinkle_services.kit.rpc.layers import map_errors


class _Disconnected:
    """Context of a call whose client has disconnected."""

    async def abort(self, *status: Any) -> None:
        del status
        raise cygrpc.ExecuteBatchError('Failed "execute_batch"')


async def test_error_of_a_disconnected_call_cancels_it() -> None:
    """A call that ends with an error after its client has disconnected is cancelled, and is not an internal error."""
    call = Call('/twinkle.Test/Get', context=_Disconnected())  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        async with map_errors(call):
            raise AdapterNotFound('ad-1')


@pytest.mark.parametrize('error', [grpc.aio.AbortError(), grpc.aio.UsageError('ended'), KeyError('other')])
def test_other_errors_are_raised(error: Exception) -> None:
    """The end of a call by its service, wrong use of the call, and other errors are not converted."""
    with pytest.raises(type(error)), cancelled_if_disconnected():
        raise error
