"""Services and clients send telemetry to a collector if the standard variables of OpenTelemetry name a collector."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent import futures
from functools import partial

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

PROGRAM = """
from twinkle_services.kit.telemetry import TelemetryConfig, measures, start_telemetry, stop_telemetry
start_telemetry(TelemetryConfig(), service='data')
measures.quota_refusals.add(3, 'datasets')
stop_telemetry()
"""
CLIENT_PROGRAM = """
from opentelemetry import trace
from twinkle_client.rpc.address import Address
from twinkle_client.rpc import Connection
Connection(Address.parse('127.0.0.1:1'), api_key='').close()
Connection(Address.parse('127.0.0.1:1'), api_key='').close()
trace.get_tracer('program').start_span('step').end()
"""
SERVICE_PROGRAM = """
from opentelemetry import trace
from twinkle_services.kit.telemetry import TelemetryConfig, start_telemetry, stop_telemetry
start_telemetry(TelemetryConfig(), service='data')
trace.get_tracer('program').start_span('step').end()
stop_telemetry()
"""


class Spans(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects the services and names of spans."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def Export(self, request, context):  # noqa: N802 (the contract's name)
        """Store the names of a request."""
        for resource in request.resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.found += [(names['service.name'], span.name) for span in spans]
        return trace_service_pb2.ExportTraceServiceResponse()


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Collects the values of counters by metric."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.services: set[str] = set()

    def Export(self, request, context):  # noqa: N802 (the contract's name)
        """Store the values of a request."""
        for resource in request.resource_metrics:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.services.add(names['service.name'])
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in metric.sum.data_points:
                    self.values[metric.name] = point.as_int
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.mark.parametrize('variable', ['OTEL_EXPORTER_OTLP_ENDPOINT', 'OTEL_EXPORTER_OTLP_METRICS_ENDPOINT'])
def test_metrics_reach_the_collector_of_the_environment(variable: str) -> None:
    """The collector receives the metrics that Prometheus would read, at the latest when the service stops."""
    collector = Collector()
    _run(PROGRAM, variable, partial(metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server, collector))
    assert collector.values['twinkle.quota.refusals'] == 3
    assert collector.services == {'twinkle-data'}


@pytest.mark.parametrize('variable', ['OTEL_EXPORTER_OTLP_ENDPOINT', 'OTEL_EXPORTER_OTLP_TRACES_ENDPOINT'])
@pytest.mark.parametrize(('program', 'service'), [(CLIENT_PROGRAM, 'client'), (SERVICE_PROGRAM, 'data')])
def test_spans_reach_the_collector_of_the_environment(program: str, service: str, variable: str) -> None:
    """The collector receives each span of a client's program and of a service once."""
    collector = Spans()
    _run(program, variable, partial(trace_service_pb2_grpc.add_TraceServiceServicer_to_server, collector))
    assert collector.found == [(f'twinkle-{service}', 'step')]


def _run(program: str, variable: str, register: Callable[[grpc.Server], None]) -> None:
    """Run a program with a collector."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    register(server)
    port = server.add_insecure_port('127.0.0.1:0')
    server.start()
    environment = {**os.environ, variable: f'http://127.0.0.1:{port}'}
    subprocess.run([sys.executable, '-c', program], check=True, env=environment)
    server.stop(None)
