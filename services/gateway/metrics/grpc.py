"""Follows the metrics that the model services report."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from services.gateway.catalogue.grpc import entry_events
from services.gateway.catalogue.rules import CatalogueEvent
from services.gateway.metrics.rules import MAX_STEP, Point, Report, RunReports, is_metric_name
from twinkle.api.model.v1 import adapter_service_pb2, adapter_service_pb2_grpc


class GrpcReportFeed:
    """Follows the reports of all tenants' runs over a channel that carries the gateway's internal identity."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)

    def follow(self, resume_token: str) -> AsyncIterator[CatalogueEvent[RunReports]]:
        call = self._stub.WatchAdapters(adapter_service_pb2.WatchAdaptersRequest(resume_token=resume_token))
        return entry_events(call, _reports_of, id_field='adapter_id', service='model')


def _reports_of(message: adapter_service_pb2.WatchAdaptersResponse) -> RunReports:
    reports = [_report_of(report) for report in message.metrics.reports]
    return RunReports(tenant_id=message.tenant_id, run_id=message.adapter.adapter_id, reports=reports)


def _report_of(message: adapter_service_pb2.MetricReport) -> Report:
    # Names of metrics that a loss or a metric of a plugin chose may be invalid.
    values = {name: value for name, value in message.values.items() if is_metric_name(name)}
    step = min(max(message.step, 0), MAX_STEP)
    points = [Point(name, step, value) for name, value in sorted(values.items())]
    return Report(sequence_number=message.sequence_number, points=points)
