"""All metrics of the services.

docs/observability.md has a table of them, which `python -m twinkle_services.kit.telemetry.measures` prints. No label
may have a value that a caller chooses, such as a tenant or an adapter: each value is a series that stays in memory for
as long as the process runs.
"""

import sys

from twinkle_services.kit.telemetry.instruments import COUNTS, Counter, Gauge, Histogram, Label

VERBS = (
    'ForwardOnly',
    'Forward',
    'CalculateLoss',
    'Backward',
    'ForwardBackward',
    'ClipGradNorm',
    'Step',
    'ZeroGrad',
    'LrStep',
    'ClipGradAndStep',
    'CalculateMetric',
    'Configure',
    'Save',
    'Load',
    'PublishVersion',
    'Undo',
    'ExportMerged',
)
"""Names of the verbs of operations; a test compares them with those of the model service."""
_VERB = Label('verb', VERBS)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_CALL_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120)
_STALL_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

rpc_calls = Counter('twinkle.rpc.calls', '{call}', 'gRPC calls served.', (Label('method'), Label('status')))
rpc_seconds = Histogram('twinkle.rpc', 's', 'Time to serve a gRPC call.', (Label('method'),), _CALL_SECONDS)
http_calls = Counter(
    'twinkle.http.calls', '{call}', "Calls of the gateway's HTTP APIs.", (Label('route'), Label('outcome'))
)
quota_refusals = Counter('twinkle.quota.refusals', '{call}', 'Calls refused because of a quota.', (Label('quota'),))
stall_seconds = Histogram(
    'twinkle.event_loop.stall',
    's',
    'Times of at least a millisecond for which the event loop was blocked.',
    bounds=_STALL_SECONDS,
)
longest_stall = Gauge(
    'twinkle.event_loop.longest_stall', 's', 'Longest time that the event loop was blocked since the start.'
)
device_memory = Gauge(
    'twinkle.device.memory',
    'By',
    "Memory of the service's GPUs: allocated and reserved by its processes, used by all processes, and total.",
    (Label('state', ('allocated', 'reserved', 'used', 'total')),),
)

queue_length = Gauge('twinkle.operation.queue.length', '{operation}', 'Operations that wait for the engine.', (_VERB,))
queue_wait = Histogram('twinkle.operation.queue.wait', 's', 'Wait of an operation for its first pass.', (_VERB,))
operation_seconds = Histogram('twinkle.operation.device', 's', 'Time that an operation spends on the engine.', (_VERB,))
pass_seconds = Histogram('twinkle.pass', 's', 'Duration of a pass through the model, shared by its operations.')
pass_rows = Histogram('twinkle.pass.rows', '{row}', 'Tokens of a pass.', bounds=COUNTS)
pass_adapters = Histogram('twinkle.pass.adapters', '{adapter}', 'Adapters that share a pass.', bounds=COUNTS)
padding_tokens = Counter('twinkle.padding.tokens', '{token}', 'Rows of passes without a token.')
shared_tokens = Counter('twinkle.shared.tokens', '{token}', 'Tokens of common prefixes that were not computed again.')
trained_tokens = Counter('twinkle.trained.tokens', '{token}', 'Tokens of finished training operations.', (_VERB,))
adapters = Gauge(
    'twinkle.adapters',
    '{adapter}',
    'Adapters of the model service, in memory or parked on disk.',
    (Label('state', ('resident', 'parked')),),
)
journal_seconds = Histogram('twinkle.journal.write', 's', 'Duration of a durable transaction of the journal.')
journal_bytes = Counter(
    'twinkle.journal.written',
    'By',
    'Bytes written by the journal.',
    (Label('kind', ('row', 'file')),),
)

prompt_tokens = Counter('twinkle.prompt.tokens', '{token}', 'Tokens of computed prompts.')
cached_tokens = Counter('twinkle.cached.tokens', '{token}', 'Tokens of prompts that the prefix cache contained.')
sampled_tokens = Counter('twinkle.sampled.tokens', '{token}', 'Tokens sampled.')
first_token_seconds = Histogram('twinkle.time_to_first_token', 's', 'Time from a request to its first token.')
token_seconds = Histogram(
    'twinkle.time_per_output_token', 's', 'Mean time of the later tokens of a prompt.', bounds=_TOKEN_SECONDS
)
sequences = Gauge(
    'twinkle.sequences', '{sequence}', 'Sequences in the engine.', (Label('state', ('running', 'waiting')),)
)
kv_usage = Gauge('twinkle.kv.usage.ratio', '1', 'Fraction of the key-value cache in use.')
prefix_hits = Gauge('twinkle.prefix.hit.ratio', '1', "Recent fraction of prompt tokens found in vLLM's prefix cache.")
resident_versions = Gauge('twinkle.resident.versions', '{version}', 'Adapter versions that the engine has loaded.')
publish_to_live = Histogram(
    'twinkle.publish_to_live', 's', 'Time from the publication of a version until a sampler can use it.'
)
received_weights = Counter(
    'twinkle.weights.received',
    'By',
    'Bytes of received states by encoding; shared memory counts the size of the state.',
    (Label('encoding', ('whole', 'delta', 'shared_memory', 'device')),),
)

store_bytes = Gauge('twinkle.store', 'By', 'Bytes of the stored states.', (Label('kind', ('version', 'checkpoint')),))
shared_memory = Gauge('twinkle.shared_memory', 'By', 'Shared memory that versions occupy.')
fleet_members = Gauge(
    'twinkle.fleet.members', '{sampler}', 'Samplers of the fleet.', (Label('state', ('ready', 'draining', 'lost')),)
)
dropped_reports = Counter(
    'twinkle.metric.reports.dropped',
    '{report}',
    'Reports of training steps that were not stored, because of a quota or damaged points.',
    (Label('cause', ('metric_points', 'metric_points_per_run', 'metric_names_per_run', 'damaged')),),
)
futures_waiting = Gauge('twinkle.futures.waiting', '{future}', 'Futures that are not finished.')


def all_metrics() -> list[Counter | Gauge | Histogram]:
    """Return all metrics of this module, in the order of their definition."""
    return [item for item in globals().values() if isinstance(item, Counter | Gauge | Histogram)]


def markdown_table() -> str:
    """Return the table of the metrics for the documentation."""
    lines = ['| metric | kind | labels | meaning |', '| --- | --- | --- | --- |']
    for metric in all_metrics():
        labels = ', '.join(f'`{label.name}`' for label in metric.labels)
        lines.append(
            f'| `{metric.prometheus_name}` | {type(metric).__name__.lower()} | {labels} | {metric.description} |'
        )
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.stdout.write(f'{markdown_table()}\n')
