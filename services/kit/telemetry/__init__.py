"""Logs, metrics and traces of a service, which `start_telemetry` configures, and its admin port."""

from twinkle_services.kit.telemetry.admin import AdminAddress, Readiness, serving_admin
from twinkle_services.kit.telemetry.setup import TelemetryConfig, start_telemetry, stop_telemetry

__all__ = ['AdminAddress', 'Readiness', 'TelemetryConfig', 'serving_admin', 'start_telemetry', 'stop_telemetry']
