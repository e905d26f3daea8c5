"""Tests of the updates of watched metrics, which are applied one after the other."""

from datetime import UTC, datetime, timedelta

from twinkle_client.metrics import MetricSeries, MetricUpdate

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def series(*points: tuple[int, float], count: int | None = None) -> MetricSeries:
    """Return a series of points; each value is stored at its own second."""
    return MetricSeries(
        steps=[step for step, _ in points],
        values=[value for _, value in points],
        times=[MOMENT + timedelta(seconds=value) for _, value in points],
        point_count=len(points) if count is None else count,
    )


def test_changes_add_and_replace_points() -> None:
    """New points are inserted by step, and a point replaces an earlier point with the same step, repeatedly."""
    known = {'loss': series((1, 1.0), (5, 5.0), (9, 9.0), count=100), 'rate': series((1, 0.1))}
    change = MetricUpdate(series={'loss': series((5, 50.0), (7, 7.0)), 'new': series((2, 2.0))}, is_snapshot=False)
    after = change.applied_to(known)
    assert after == {
        'loss': series((1, 1.0), (5, 50.0), (7, 7.0), (9, 9.0), count=101),
        'rate': known['rate'],
        'new': series((2, 2.0)),
    }
    assert change.applied_to(after) == after
    assert known['loss'].point_count == 100


def test_snapshot_replaces_all_points() -> None:
    """A snapshot removes the points and metrics that it does not contain."""
    snapshot = MetricUpdate(series={'loss': series((1, 3.0))}, is_snapshot=True)
    assert snapshot.applied_to({'loss': series((1, 1.0), (2, 2.0)), 'old': series((1, 1.0))}) == snapshot.series
