"""Timing without a GPU."""

from graphfuse.runtime import timing


def test_uncaptured_calls_follow_one_another(monkeypatch):
    """Rounds of several calls, after one that is not timed."""
    log, times = [], iter((30.0, 90.0, 60.0))

    def between(work):
        log.append("round")
        work()
        return next(times)

    monkeypatch.setattr(timing, "_between", between)
    assert timing.measure_uncaptured(lambda: log.append("call")) == timing.Time(20.0, 10.0, 30.0)
    assert log == ["call", *["round", *["call"] * 3] * 3]
