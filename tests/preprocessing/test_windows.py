"""SlidingWindows, window by window."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from sklearn_mhla import MHLARegressor
from sklearn_mhla.preprocessing import SlidingWindows


@given(
    n_times=st.integers(1, 30),
    length=st.integers(1, 6),
    step=st.integers(1, 4),
    horizons=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    d=st.integers(1, 3),
)
def test_windows_and_targets(n_times, length, step, horizons, d):
    series = reference.make_sequences(0.0, 1, n_times, d)[0]
    windows = SlidingWindows(length, horizon=horizons, step=step)
    starts = range(0, n_times - length + 1, step)
    if not len(starts):
        with pytest.raises(ValueError, match=f"has {n_times} time points"):
            windows.fit(series).transform(series)
        return
    every = windows.fit(series).transform(series)
    np.testing.assert_array_equal(every, [series[s : s + length] for s in starts])
    known = [s for s in starts if s + length - 1 + max(horizons) < n_times]
    if not known:
        with pytest.raises(ValueError, match="need at least"):
            windows.split(series)
        return
    X, y = windows.split(series)
    np.testing.assert_array_equal(X, [series[s : s + length] for s in known])
    expected = [[series[s + length - 1 + h] for h in horizons] for s in known]
    np.testing.assert_array_equal(y.reshape(len(known), -1), np.reshape(expected, (len(known), -1)))


def test_nothing_is_copied():
    series = np.zeros((1000, 2))
    assert np.shares_memory(SlidingWindows(10).fit(series).transform(series), series)


def test_several_series_do_not_run_into_each_other():
    parts = reference.make_ragged([5, 2, 7], 1)
    X, y = SlidingWindows(3, horizon=1).split(parts)
    expected = [part[s : s + 3] for part in parts for s in range(len(part) - 3)]
    np.testing.assert_array_equal(X, expected)
    goals = [part[s + 3, 0] for part in parts for s in range(len(part) - 3)]
    np.testing.assert_array_equal(y, goals)
    _, other = SlidingWindows(3).split(parts, [10.0 * part[:, 0] for part in parts])
    np.testing.assert_allclose(other, 10.0 * y)


def test_frames_and_targets():
    frame = pd.DataFrame({"demand": np.arange(8.0), "heat": np.arange(8.0) ** 2})
    windows = SlidingWindows(3, horizon=2, target=1).fit(frame)
    assert list(windows.get_feature_names_out()) == ["demand", "heat"]
    np.testing.assert_array_equal(windows.split(frame)[1], [16.0, 25.0, 36.0, 49.0])


def test_columns_in_another_order_are_refused():
    frame = pd.DataFrame({"demand": np.arange(8.0), "heat": np.arange(8.0) ** 2})
    windows = SlidingWindows(3).fit(frame)
    with pytest.raises(ValueError, match="feature names"):
        windows.transform(frame[["heat", "demand"]])
    np.testing.assert_array_equal(windows.transform([frame.to_numpy()]), windows.transform(frame))


def test_another_series_as_target():
    X, Y = reference.make_sequences(0.0, 2, 9, 2, seed=0), reference.make_sequences(0.0, 2, 9, 3)
    expected = Y[:, 4:, 1].reshape(-1)  # windows of four, one step ahead
    _, y = SlidingWindows(4, target=1).split(X, Y)
    np.testing.assert_array_equal(y, expected)
    _, y = SlidingWindows(4, target=1).split(X[:1], Y[:1])  # a batch of one is still a batch
    np.testing.assert_array_equal(y, expected[:5])
    _, y = SlidingWindows(4).split([X[0]], [Y[0, :, 1]])
    np.testing.assert_array_equal(y, expected[:5])


def test_a_recurrence_is_learned():
    series = [1.0, 0.5]
    for _ in range(100):
        series.append(1.8 * series[-1] - 0.97 * series[-2] + 0.1)
    X, y = SlidingWindows(2).split(np.array(series)[:, None])
    Z = np.concatenate([X, np.ones((len(X), 2, 1)), np.tile([[-1.0], [1.0]], (len(X), 1, 1))], 2)
    assert MHLARegressor().fit(Z[:50], y[:50]).score(Z[50:], y[50:]) > 0.999


def test_errors():
    series = np.zeros((9, 2))
    for wrong, name in [
        ({"length": 0}, "length"),
        ({"step": 0}, "step"),
        ({"horizon": 0}, "horizon"),
    ]:
        with pytest.raises(ValueError, match=name):
            SlidingWindows(**{"length": 3, **wrong}).fit(series)
    with pytest.raises(ValueError, match="horizon must be positive integers"):
        SlidingWindows(3, horizon=[0.5]).fit(series)
    with pytest.raises(ValueError, match="as many time points"):
        SlidingWindows(3).split(series, np.zeros(8))
    with pytest.raises(ValueError, match="one series for each of the 2 of X; got 1"):
        SlidingWindows(3).split([series, series], [np.zeros(9)])
    with pytest.raises(ValueError, match=r"same columns; got \[1, 2\]"):
        SlidingWindows(3).split([series, series], [np.zeros(9), np.zeros((9, 2))])
    for target, message in [
        (2, r"target must lie in 0\.\.1"),
        (-1, r"target must lie in 0\.\.1"),
        ("demand", "target must be distinct integers"),
        ([True, False], "target must be distinct integers"),
        ([], "target must be distinct integers"),
    ]:
        with pytest.raises(ValueError, match=message):
            SlidingWindows(3, target=target).split(series)
    with pytest.raises(ValueError, match=r"target must lie in 0\.\.0"):
        SlidingWindows(3, target=1).split(series, np.zeros(9))
    with pytest.raises(ValueError, match="d=2"):
        SlidingWindows(3).fit(series).transform(np.zeros((9, 3)))
