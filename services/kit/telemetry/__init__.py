"""Logs, metrics and traces of a service. `start_telemetry` configures all three."""

from services.kit.telemetry.setup import TelemetryConfig, start_telemetry, stop_telemetry

__all__ = ['TelemetryConfig', 'start_telemetry', 'stop_telemetry']
