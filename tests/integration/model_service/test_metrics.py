"""The model service records its passes, tokens, queue and journal as metrics."""

from typing import Any

from fixtures.model_service import batch_of, draw_example, forward_backward
from fixtures.recorded_metrics import metric, series
from twinkle.api.model.v1 import operation_pb2
from twinkle_services.kit.telemetry import measures

BATCH = [draw_example(10, 1), draw_example(17, 2)]
TOKENS = sum(len(example['input_ids']) for example in BATCH)
COUNTED = {
    'passes': ('twinkle_pass_seconds_count', {}),
    'rows': ('twinkle_pass_rows_sum', {}),
    'adapters': ('twinkle_pass_adapters_sum', {}),
    'trained': ('twinkle_trained_tokens_total', {'verb': 'ForwardBackward'}),
    'evaluated': ('twinkle_trained_tokens_total', {'verb': 'ForwardOnly'}),
    'waits': ('twinkle_operation_queue_wait_seconds_count', {'verb': 'ClipGradAndStep'}),
    'steps': ('twinkle_operation_device_seconds_count', {'verb': 'ClipGradAndStep'}),
}


def _values() -> dict[str, float]:
    return {key: metric(name, **labels) for key, (name, labels) in COUNTED.items()}


async def test_operations_are_measured(service: Any) -> None:
    """The metrics count the rows and adapters of passes, the tokens and times of verbs, and the journal's writes."""
    adapter = await service.create()
    before, journal = _values(), metric('twinkle_journal_written_bytes_total', kind='row')
    writes = metric('twinkle_journal_write_seconds_count')
    await service.result(adapter.adapter_id, 1, forward_backward=forward_backward(BATCH))
    await service.result(adapter.adapter_id, 2, clip_grad_and_step=operation_pb2.ClipGradAndStep())
    await service.result(adapter.adapter_id, 3, forward_only=operation_pb2.ForwardOnly(batch=batch_of(BATCH)))
    growth = {key: value - before[key] for key, value in _values().items()}
    expected = {'passes': 2, 'rows': 2 * TOKENS, 'adapters': 2, 'trained': TOKENS, 'evaluated': TOKENS}
    assert growth == {**expected, 'waits': 1, 'steps': 1}
    assert metric('twinkle_journal_written_bytes_total', kind='row') > journal
    assert metric('twinkle_journal_write_seconds_count') >= writes + 3


async def test_adapters_and_the_queue_are_reported(service: Any) -> None:
    """Adapters are reported as resident or parked, and the length of the queue is reported by verb."""
    with service.verbs.observed():
        await service.create()
        assert (metric('twinkle_adapters', state='resident'), metric('twinkle_adapters', state='parked')) == (1, 0)
        assert metric(measures.queue_length.prometheus_name, verb='ForwardBackward') == 0
        assert 'twinkle_operation_queue_length{verb="ForwardBackward"}' in series()
