"""Cut long series into overlapping sequences, with targets for forecasting."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, check_scalar

from sklearn_mhla._tokens import (
    Sequences,
    check_sequences,
    compare_features,
    describe_columns,
    store_columns,
)
from sklearn_mhla.preprocessing._base import chosen_columns


class SlidingWindows(
    TransformerMixin,
    BaseEstimator,
    auto_wrap_output_keys=None,  # type: ignore[call-arg]
):
    """Overlapping windows of a series, and what comes after each.

    `transform` gives every window, the latest included: what a fitted model predicts from.
    `split` gives the windows whose future is known, and that future: what a model is fitted on.
    The number of windows is not the number of time points, so this is a step before a Pipeline,
    not inside it. Windows are views where the series is one array: nothing is copied.

    Parameters
    ----------
    length : int, default=24
        Time points per window.
    horizon : int or sequence of int, default=1
        How many steps after the last point of a window the target lies; several give as many
        outputs.
    step : int, default=1
        Time points between the starts of two windows.
    target : int or sequence of int, default=None
        Columns to predict of the series, or of ``y`` where `split` is given one; None takes all.

    Attributes
    ----------
    token_dim_ : int
        Number of features of the series.
    n_features_in_ : int
        The same.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Column names of a data frame.

    Notes
    -----
    Neighbouring windows share most of their points. A split at random would test on what was
    trained on: use ``sklearn.model_selection.TimeSeriesSplit(gap=...)`` with a gap of at least
    ``(length + max(horizon) - 1) / step``.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla.preprocessing import SlidingWindows
    >>> X, y = SlidingWindows(length=3).split(np.arange(6.0)[:, None])
    >>> X[:, :, 0]
    array([[0., 1., 2.],
           [1., 2., 3.],
           [2., 3., 4.]])
    >>> y
    array([3., 4., 5.])
    """

    token_dim_: int

    def __init__(
        self, length: int = 24, *, horizon: Any = 1, step: int = 1, target: Any = None
    ) -> None:
        self.length = length
        self.horizon = horizon
        self.step = step
        self.target = target

    def fit(self, X: Any, y: Any = None) -> SlidingWindows:
        """Learn the number of features.

        Parameters
        ----------
        X : array-like of shape (n_times, d), (n_series, n_times, d), or list of arrays of shape \
(n_times_i, d)
            One series or several.
        y : None
            Ignored.

        Returns
        -------
        SlidingWindows
            This transformer, fitted.
        """
        self._check_parameters()
        series = check_sequences(X, cubic=False)
        store_columns(self, describe_columns(X, series) | {"token_dim_": series.token_dim})
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Every window.

        Parameters
        ----------
        X : array-like of shape (n_times, d), (n_series, n_times, d), or list of arrays of shape \
(n_times_i, d)
            One series or several.

        Returns
        -------
        ndarray of shape (n_windows, length, d)
            Windows in the order of time, series after series.

        Raises
        ------
        ValueError
            If no series is as long as a window.
        """
        check_is_fitted(self)
        checked = check_sequences(X, token_dim=self.token_dim_, cubic=False)
        compare_features(self, X)
        series = _parts(checked)
        long_enough = [part for part in series if len(part) >= self.length]
        if not long_enough:
            raise ValueError(self._too_short(series, self.length))
        return _joined([self._windows(part) for part in long_enough])

    def split(self, X: Any, y: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Windows whose future is known, and that future.

        Parameters
        ----------
        X : array-like of shape (n_times, d), (n_series, n_times, d), or list of arrays of shape \
(n_times_i, d)
            One series or several.
        y : array-like of shape (n_times,) or (n_times, m), or list of these, default=None
            Another series to predict, as long as ``X``: one if ``X`` is 2-D, else one per series.
            None predicts ``X`` itself.

        Returns
        -------
        windows : ndarray of shape (n_windows, length, d)
            Windows in the order of time, series after series.
        targets : ndarray of shape (n_windows,) or (n_windows, n_horizons * n_targets)
            What lies ``horizon`` steps after the last point of each window, one horizon after
            the other.

        Raises
        ------
        ValueError
            If no series is longer than a window by the horizon, or ``y`` does not fit ``X``.
        """
        self.fit(X)
        steps = np.atleast_1d(self.horizon)
        furthest = int(steps.max())
        checked = check_sequences(X, cubic=False)
        series = _parts(checked)
        goals = series if y is None else _goals(y, series, checked.layout == "flat")
        columns = chosen_columns(self.target, "target", goals[0].shape[1])
        windows, targets = [], []
        for part, goal in zip(series, goals, strict=True):
            if len(part) < self.length + furthest:
                continue
            windows.append(self._windows(part[: len(part) - furthest]))
            last = self.length - 1 + self.step * np.arange(len(windows[-1]))
            future = goal[:, columns][last[:, None] + steps]
            targets.append(future.reshape(len(last), -1))
        if not windows:
            raise ValueError(self._too_short(series, self.length + furthest))
        joined = np.concatenate(targets)
        return _joined(windows), joined[:, 0] if joined.shape[1] == 1 else joined

    def _windows(self, part: np.ndarray) -> np.ndarray:
        """Windows of one series as a view, (n_windows, length, d)."""
        return sliding_window_view(part, self.length, axis=0).swapaxes(1, 2)[:: self.step]

    def _too_short(self, series: list[np.ndarray], needed: int) -> str:
        return (
            f"The longest series has {max(map(len, series))} time points, but length={self.length}"
            f" and horizon={self.horizon} need at least {needed}."
        )

    def _check_parameters(self) -> None:
        check_scalar(self.length, "length", Integral, min_val=1)
        check_scalar(self.step, "step", Integral, min_val=1)
        steps = np.atleast_1d(np.asarray(self.horizon))
        if steps.dtype.kind not in "iu" or steps.ndim != 1 or not len(steps) or steps.min() < 1:
            raise ValueError(f"horizon must be positive integers; got {self.horizon!r}.")

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the features of a token, which are those of the series.

        Parameters
        ----------
        input_features : None
            Ignored.

        Returns
        -------
        ndarray of str of shape (d,)
            One name per feature of a token.
        """
        check_is_fitted(self)
        generated = [f"x{j}" for j in range(self.token_dim_)]
        return np.asarray(getattr(self, "feature_names_in_", generated), dtype=object)


def _goals(y: Any, series: list[np.ndarray], one: bool) -> list[np.ndarray]:
    """The series to be predicted, each (n_times, m), checked against the input."""
    several = [y] if one else list(y)
    if len(several) != len(series):
        raise ValueError(
            f"y must hold one series for each of the {len(series)} of X; got {len(several)}."
        )
    goals = [
        check_array(goal, ensure_2d=False, dtype=np.float64, input_name="y") for goal in several
    ]
    goals = [goal.reshape(len(goal), -1) for goal in goals]
    if list(map(len, goals)) != list(map(len, series)):
        raise ValueError(
            f"y must have as many time points as X, {list(map(len, series))}; got "
            f"{list(map(len, goals))}."
        )
    if len({goal.shape[1] for goal in goals}) > 1:
        raise ValueError(
            f"All series of y must have the same columns; got {[goal.shape[1] for goal in goals]}."
        )
    return goals


def _parts(series: Sequences) -> list[np.ndarray]:
    """Every series, (n_times, d); a 2-D input is one."""
    if series.layout == "flat":
        return [np.asarray(series.data)[:, 0]]
    return list(series.data if series.layout == "list" else np.asarray(series.data))


def _joined(windows: list[np.ndarray]) -> np.ndarray:
    return windows[0] if len(windows) == 1 else np.concatenate(windows)
