"""Least squares in the span of the rows, and when it is chosen."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import MHLARegressor
from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._pivoted_cholesky import factor_parts
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.solvers import (
    LeastSquaresProblem,
    PivotedSolver,
    _pivoted,
    pivoted_if_low_rank,
)


def one_hot(n_samples, token_dim, n_tokens=6, seed=0):
    random = np.random.default_rng(seed)
    return np.eye(token_dim)[random.integers(0, token_dim, (n_samples, n_tokens))]


def one_hot_ragged(n_samples, token_dim, seed=0):
    random = np.random.default_rng(seed)
    return [
        np.eye(token_dim)[random.integers(0, token_dim, length)]
        for length in random.integers(1, 9, n_samples)
    ]


def joint_blocks(n_samples, seed=0):
    """Queries that share coordinates in some rows and not in others; integer entries."""
    random = np.random.default_rng(seed)
    X = np.zeros((n_samples, 5, 7))
    X[:, :, :4] = np.eye(4)[random.integers(0, 4, (n_samples, 5))]
    X[::2, :, 4:] = np.eye(3)[random.integers(0, 3, (n_samples - n_samples // 2, 5))]
    X[::2, :, :2] *= -1.0
    return X


def rows_of_all_sizes(n_samples):
    X = reference.make_sequences(0.0, n_samples, 4, 3)[:, :, [0, 1, 2, 1]]
    return X * np.random.default_rng(1).permutation(np.logspace(-1, 1, n_samples))[:, None, None]


LOW_RANK = {
    "one-hot": lambda: one_hot(300, 5),
    "one-hot, ragged": lambda: one_hot_ragged(200, 4),
    "few distinct rows": lambda: np.tile(one_hot(15, 6), (20, 1, 1)),
    "joint blocks": lambda: joint_blocks(200),
    "repeated coordinates": lambda: reference.make_sequences(0.0, 80, 5, 3)[:, :, [0, 1, 2, 0, 1]],
    "one token": lambda: reference.make_sequences(0.0, 150, 1, 5),
    "rows of all sizes": lambda: rows_of_all_sizes(80),
    "some rows zero": lambda: np.concatenate([one_hot(60, 5), np.zeros((20, 6, 5))]),
    "sizes 1e-4": lambda: 1e-4 * one_hot(100, 5),
    "sizes 1e4": lambda: 1e4 * one_hot(100, 5),
}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("fit_intercept", [False, True], ids=["through 0", "intercept"])
@pytest.mark.parametrize("alpha", [0.0, 1e-3, 10.0])
@pytest.mark.parametrize("name", LOW_RANK)
def test_noisy_targets_are_fitted_by_all_rows_not_by_the_pivots(
    name, alpha, fit_intercept, weighted
):
    X = LOW_RANK[name]()
    features = reference.feature_matrix(X)
    alpha = alpha * np.abs(features).max() ** 2
    random = np.random.default_rng(7)
    y = 1.0 + random.standard_normal((len(X), 3))
    weights = random.integers(0, 4, len(X)) + 0.5 * (random.uniform(size=len(X)) > 0.5)
    weights = weights if weighted else None
    model = MHLARegressor(method="pivoted", alpha=alpha, fit_intercept=fit_intercept)
    model.fit(X, y, sample_weight=weights)
    coef, intercept = reference.ridge(features, y, alpha, fit_intercept, weights)
    assert model.method_ == "pivoted"
    assert reference.relative_error(model.coef_, coef) < 1e-8
    np.testing.assert_allclose(model.intercept_, intercept, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("output", [{"causal": True}, {"causal": False}, {"state": "mean"}])
def test_every_token_is_a_row(output):
    X = one_hot(40, 4)
    y = np.random.default_rng(7).standard_normal((40, 6, 2))
    model = MHLARegressor(method="pivoted", output="sequence", **output).fit(X, y)
    features = reference.feature_matrix(X, output="sequence", **output)
    coef, _ = reference.ridge(features, y.reshape(-1, 2))
    assert reference.relative_error(model.coef_, coef) < 1e-8
    assert model.rank_ == np.linalg.matrix_rank(features)


def test_predictions_of_covered_inputs_are_exact():
    """Integer heads on one-hot tokens: every number of the truth is an integer."""
    random = np.random.default_rng(3)
    value, key_query = random.integers(-2, 3, (2, 3, 5)), random.integers(-2, 3, (2, 5, 5))
    X, new = one_hot(400, 5), one_hot(200, 5, seed=9)
    model = MHLARegressor(method="pivoted").fit(X, reference.predict_heads(value, key_query, X))
    truth = reference.predict_heads(value, key_query, new)
    assert model.rank_ < 75  # of p
    assert np.abs(model.predict(new) - truth).max() < 1e-12 * np.abs(truth).max()


def problem(X, n_outputs=2, **options):
    design = Design(check_sequences(X), NumpyBackend(), **options)
    y = np.random.default_rng(7).standard_normal((design.n_rows, n_outputs))
    return LeastSquaresProblem(design, y, None, False)


def test_repeated_rows_cost_a_row_of_the_factor():
    """They are put aside when what they repeat becomes a pivot: few columns, short ones."""
    X = reference.make_sequences(0.0, 300, 4, 6)
    solver = PivotedSolver(problem(np.tile(X[:80], (50, 1, 1))))
    assert solver.rank == 80
    assert (
        sum(factor.size for part in solver.parts for _, factor in part.factor.pieces) <= 80 * 4000
    )


def half_equal(n_samples):
    """A sample is deficient, but the rank is half the number of rows."""
    X = reference.make_sequences(0.0, n_samples, 4, 8)
    X[::2] = X[0]
    return X


@pytest.fixture
def small_counts_as_large(monkeypatch):
    monkeypatch.setattr(_pivoted, "_WORTH_A_LOOK", 16)


@pytest.mark.usefixtures("small_counts_as_large")
@pytest.mark.parametrize(
    "make",
    [
        lambda: one_hot(2000, 6, 3),
        lambda: np.tile(reference.make_sequences(0.0, 40, 4, 6), (50, 1, 1)),
        lambda: reference.make_sequences(0.0, 300, 4, 3)[:, :, [0, 1, 2] * 3],
    ],
)
def test_auto_finds_low_rank(make, capsys):
    X = make()
    y = np.random.default_rng(7).standard_normal(len(X))
    model = MHLARegressor(verbose=1).fit(X, y)
    assert model.method_ == "pivoted"
    assert f"rank={model.rank_} is low" in capsys.readouterr().out
    other = MHLARegressor(method="dual").fit(X, y)
    assert model.rank_ == other.rank_
    assert reference.relative_error(model.coef_, other.coef_) < 1e-8


@pytest.mark.usefixtures("small_counts_as_large")
@pytest.mark.parametrize(
    ("X", "method"),
    [
        (reference.make_sequences(0.0, 200, 4, 8), "dual"),
        (reference.make_sequences(0.0, 200, 4, 4), "primal"),
        (half_equal(200), "dual"),
    ],
    ids=["rows < p", "rows > p", "deficient, but not low"],
)
def test_auto_keeps_to_the_smaller_system_otherwise(X, method):
    model = MHLARegressor().fit(X, np.random.default_rng(7).standard_normal(len(X)))
    assert model.method_ == method


@pytest.mark.usefixtures("small_counts_as_large")
def test_a_sample_is_enough_to_see_that_rows_are_independent(monkeypatch):
    factored = []

    def spy(rows, *args, **options):
        factored.append(len(rows.norm))
        return factor_parts(rows, *args, **options)

    monkeypatch.setattr(_pivoted, "factor_parts", spy)
    assert pivoted_if_low_rank(problem(reference.make_sequences(0.0, 200, 4, 8))) is None
    assert factored == [25]
    assert pivoted_if_low_rank(problem(half_equal(200))) is None
    assert factored == [25, 25, 200]


@pytest.mark.usefixtures("small_counts_as_large")
def test_auto_leaves_few_long_sequences_alone():
    X = reference.make_ragged([40, 60], 4)
    assert pivoted_if_low_rank(problem(X, output="sequence")) is None


def test_small_problems_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(_pivoted, "unit_rows", None)
    assert pivoted_if_low_rank(problem(one_hot(300, 5))) is None


@pytest.mark.usefixtures("small_counts_as_large")
def test_auto_does_not_start_what_memory_cannot_hold(monkeypatch):
    small = problem(one_hot(500, 6, 3))
    assert pivoted_if_low_rank(small) is not None
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 2 * 10**4)
    assert pivoted_if_low_rank(small) is None


def test_a_rank_that_memory_cannot_hold(monkeypatch):
    rows = problem(reference.make_sequences(0.0, 60, 4, 4))
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 16 * 60 * 20)
    with pytest.raises(MemoryError, match=r"the rank of these 60 rows is above 20"):
        PivotedSolver(rows)


@pytest.mark.parametrize("options", [{"n_heads": 1}, {"penalty": "nuclear", "alpha": 1.0}])
def test_only_for_unrestricted_models(options):
    X = reference.make_sequences(0.0, 20)
    with pytest.raises(ValueError, match="method='pivoted' needs n_heads=None and penalty='l2'"):
        MHLARegressor(method="pivoted", **options).fit(X, np.ones(20))
