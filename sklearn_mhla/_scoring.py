"""Scores of held-out predictions."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin

from sklearn_mhla._backend import Array
from sklearn_mhla._tokens import Rows
from sklearn_mhla.solvers import LeastSquaresProblem

Scorer = Callable[..., float]


class _Predictions(RegressorMixin, BaseEstimator):
    """What scorers take for an estimator: it is given its predictions."""

    def predict(self, X: np.ndarray) -> np.ndarray:
        return X


class Scoring:
    """Scores of predictions for several penalties at once.

    Parameters
    ----------
    problem : LeastSquaresProblem
    rows : Rows
        With the targets in the user's units.
    scorer : callable or None
    per_target : bool
        One score per output.
    squeeze : bool
        Whether scorers see a vector of targets.
    """

    def __init__(
        self,
        problem: LeastSquaresProblem,
        rows: Rows,
        scorer: Scorer | None,
        *,
        per_target: bool,
        squeeze: bool,
    ) -> None:
        self.problem, self.rows, self.scorer = problem, rows, scorer
        self.per_target, self.squeeze = per_target, squeeze

    def score(self, rows: np.ndarray, errors: Array) -> np.ndarray:
        """Scores of shape (n_alphas,) or (n_alphas, m).

        Parameters
        ----------
        rows : ndarray of shape (k,)
        errors : array of shape (k, n_alphas, m)
            Targets minus predictions, in the units of the problem.
        """
        if self.scorer is None:
            return self.of_squares(self.squares(rows, errors), self.weight(rows))
        targets = self.rows.targets[rows]
        exponent = self.problem.target_exponent
        predicted = targets[:, None] - np.ldexp(self.problem.backend.to_numpy(errors), exponent)
        options = {}
        if self.rows.weights is not None and _takes_weights(self.scorer):
            options["sample_weight"] = self.rows.weights[rows]
        views = [(slice(None), j) for j in range(targets.shape[1])] if self.per_target else [...]
        if self.squeeze:
            views = [(slice(None), 0)]
        scores = [
            [
                self.scorer(_Predictions(), predicted[:, k][view], targets[view], **options)
                for view in views
            ]
            for k in range(predicted.shape[1])
        ]
        array = np.array(scores, dtype=np.float64)
        return array if self.per_target else array[:, 0]

    def squares(self, rows: np.ndarray, errors: Array) -> Array:
        """Weighted sums of squared errors, shape (n_alphas, m)."""
        squares = errors**2
        if self.problem.weights is not None:
            squares *= self.problem.weights[rows][:, None]
        return squares.sum(0)

    def weight(self, rows: np.ndarray) -> float:
        """Sum of weights."""
        return len(rows) if self.rows.weights is None else float(self.rows.weights[rows].sum())

    def of_squares(self, squares: Array, weight: float) -> np.ndarray:
        """Negative mean squared errors."""
        scores: np.ndarray = -self.problem.backend.to_numpy(squares) / weight
        return scores if self.per_target else scores.mean(1)

    def in_units(self, scores: np.ndarray) -> np.ndarray:
        """Scores in the user's units; infinite where float64 cannot hold the squares."""
        exponent = 2 * self.problem.target_exponent if self.scorer is None else 0
        with np.errstate(over="ignore"):
            scaled: np.ndarray = np.ldexp(scores, exponent)
        return scaled


def _takes_weights(scorer: Scorer) -> bool:
    metric = getattr(scorer, "_score_func", scorer)  # scorers of scikit-learn wrap a metric
    return "sample_weight" in inspect.signature(metric).parameters
