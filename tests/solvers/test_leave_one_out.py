"""Closed-form leave-one-out errors against refits written out."""

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from reference import make_ragged, make_sequences, relative_error

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.solvers import (
    DualSolver,
    LeastSquaresProblem,
    PrimalSolver,
    leave_one_out,
)
from sklearn_mhla.solvers._leave_one_out import _at_least

SOLVERS = [PrimalSolver, DualSolver]


def closed_form(solver, X, y, weights, alphas, fit_intercept, options=None, backend=None):
    """Errors of shape (rows, n_alphas, m)."""
    backend = backend or NumpyBackend()
    design = Design(check_sequences(X), backend, **(options or {}))
    scale = 2.0 ** (-6 * design.exponent)
    problem = LeastSquaresProblem(
        design,
        backend.asarray(y),
        None if weights is None else backend.asarray(weights),
        fit_intercept,
    )
    errors = np.full((len(y), len(alphas), y.shape[1]), np.nan)
    penalties = backend.asarray(np.array(alphas) * scale)
    for rows, of_rows in leave_one_out(problem, solver(problem), penalties):
        errors[rows] = backend.to_numpy(of_rows)
    return errors


def refits(X, y, weights, alphas, fit_intercept, options=None, sequence_of=None):
    """The same, from one fit per sequence that is left out."""
    features = reference.feature_matrix(X, **(options or {}))
    sequence_of = np.arange(len(y)) if sequence_of is None else sequence_of
    weights = np.ones(len(y)) if weights is None else weights
    errors = np.empty((len(y), len(alphas), y.shape[1]))
    for left_out in np.unique(sequence_of):
        out = sequence_of == left_out
        for k, alpha in enumerate(alphas):
            coef, intercept = reference.ridge(
                features[~out], y[~out], alpha, fit_intercept, weights[~out]
            )
            errors[out, k] = y[out] - features[out] @ coef.T - intercept
    return errors


def data(n_samples, n_rows=None, n_outputs=7, seed=0):
    random = np.random.default_rng(seed)
    y = random.standard_normal((n_rows or n_samples, n_outputs))
    return make_sequences(0.3, n_samples), y, random.uniform(0.1, 5.0, n_samples)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("n_samples", [10, 40])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_case_N03_equals_refits(solver, n_samples, fit_intercept):
    X, y, weights = data(n_samples)
    computed = closed_form(solver, X, y, weights, [0.3], fit_intercept)
    expected = refits(X, y, weights, [0.3], fit_intercept)
    assert relative_error(computed, expected) < 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("weighted", [True, False])
def test_many_penalties_at_once(solver, weighted):
    X, y, weights = data(30)
    weights = weights if weighted else None
    alphas = [1e-2, 1.0, 1e2, 1e6]
    computed = closed_form(solver, X, y, weights, alphas, True)
    expected = refits(X, y, weights, alphas, True)
    for k in range(len(alphas)):
        assert relative_error(computed[:, k], expected[:, k]) < 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("state", ["sum", "mean"])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_whole_sequences_are_left_out(solver, causal, state, fit_intercept):
    options = {"output": "sequence", "causal": causal, "state": state}
    X, y, weights = data(7, 35, n_outputs=2)
    sequence_of = np.repeat(np.arange(7), 5)
    weights = weights[sequence_of]
    alphas = [0.3, 30.0]
    computed = closed_form(solver, X, y, weights, alphas, fit_intercept, options)
    expected = refits(X, y, weights, alphas, fit_intercept, options, sequence_of)
    assert relative_error(computed, expected) < 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_sequences_are_left_out(solver, causal):
    options = {"output": "sequence", "causal": causal, "state": "sum"}
    lengths = [3, 1, 6, 3, 2, 6, 1]
    X = make_ragged(lengths, 3)
    sequence_of = np.repeat(np.arange(len(lengths)), lengths)
    random = np.random.default_rng(0)
    y = random.standard_normal((len(sequence_of), 2))
    weights = random.uniform(0.1, 5.0, len(lengths))[sequence_of]
    computed = closed_form(solver, X, y, weights, [0.3], True, options)
    expected = refits(X, y, weights, [0.3], True, options, sequence_of)
    assert relative_error(computed, expected) < 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
def test_ragged_sequences_with_one_output_each(solver):
    X = make_ragged([3, 1, 6, 3, 2, 6, 1, 9], 2)
    y = np.random.default_rng(0).standard_normal((8, 3))
    computed = closed_form(solver, X, y, None, [0.3], True)
    assert relative_error(computed, refits(X, y, None, [0.3], True)) < 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("n_samples", [2, 3])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_very_few_rows(solver, n_samples, fit_intercept):
    X, y, weights = data(n_samples)
    computed = closed_form(solver, X, y, weights, [0.3], fit_intercept)
    assert relative_error(computed, refits(X, y, weights, [0.3], fit_intercept)) < 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
def test_rank_deficient_rows(solver):
    # Repeated sequences, a zero token axis, and a sequence that alone has a certain direction.
    X, y, weights = data(30)
    X[:, :, 2] = 0.0
    X[10:20] = X[:10]
    X[0, :, 2] = 1.0
    computed = closed_form(solver, X, y, weights, [0.3, 10.0], True)
    assert relative_error(computed, refits(X, y, weights, [0.3, 10.0], True)) < 1e-9


def test_interpolation_with_hardly_any_penalty():
    # rows < p: fitted errors vanish with alpha, leave-one-out errors do not.
    X, y, weights = data(10)
    computed = closed_form(DualSolver, X, y, weights, [1e-12], False)
    features = reference.feature_matrix(X)
    for i in range(10):
        rest = np.arange(10) != i
        coef = np.linalg.pinv(features[rest]) @ y[rest]
        assert relative_error(computed[i, 0], y[i] - features[i] @ coef) < 1e-6


@pytest.mark.parametrize("solver", SOLVERS)
def test_dominant_row(solver):
    # One leverage is 1 to nine digits, and the condition number of the system is 1e10.
    X, y, _ = data(40)
    X[0] *= 30.0
    computed = closed_form(solver, X, y, None, [0.3], True)
    expected = refits(X, y, None, [0.3], True)
    assert relative_error(computed[1:], expected[1:]) < 1e-6
    assert relative_error(computed[0], expected[0]) < 1e-5


@pytest.mark.parametrize("solver", SOLVERS)
def test_penalty_far_below_rounding(solver):
    # rows > p: least squares, also where the kernel's null space has eigenvalues of 1e-16.
    X, y, weights = data(40)
    computed = closed_form(solver, X, y, weights, [1e-18], True)
    assert relative_error(computed, refits(X, y, weights, [0.0], True)) < 1e-8


@pytest.mark.parametrize("solver", SOLVERS)
def test_leverage_of_one_to_rounding_leaves_finite_errors(solver):
    # rows < p: in the primal form they have no digits.
    X, y, weights = data(10)
    X[0] *= 1e3
    errors = closed_form(solver, X, y, weights, [1e-30], True)
    assert np.isfinite(errors).all()


def test_lower_bound_of_one_minus_the_leverage():
    random = np.random.default_rng(0)
    for share in (1.0, 0.7):
        parts = random.random(6)
        parts *= share / parts.sum()
        eigenvalues, alphas = 10.0 ** random.uniform(-3, 3, 6), np.array([1e-9, 1.0, 1e9])
        rest = np.array([[(parts * alpha / (eigenvalues + alpha)).sum() for alpha in alphas]])
        kernel = np.array([[parts @ eigenvalues]])
        arguments = (np.array([[share]]), kernel, alphas)
        np.testing.assert_array_equal(_at_least(rest, *arguments), rest)
        lifted = _at_least(rest - 1.0, *arguments)
        assert (lifted > 0.0).all()
        assert (lifted <= rest).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_more_rows_than_one_chunk(solver):
    X, y, _ = data(1500, n_outputs=1)
    computed = closed_form(solver, X, y, None, [3.0], True)
    features = np.column_stack([np.ones(1500), reference.feature_matrix(X)])
    penalty = 3.0 * np.eye(features.shape[1])
    penalty[0, 0] = 0.0
    hat = features @ np.linalg.solve(features.T @ features + penalty, features.T)
    expected = (y - hat @ y) / (1.0 - np.diag(hat))[:, None]
    assert relative_error(computed[:, 0], expected) < 1e-10


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("output", ["last", "sequence"])
def test_torch_gives_the_same(solver, output):
    pytest.importorskip("torch")
    from sklearn_mhla._backend import TorchBackend

    options = {"output": output, "causal": True, "state": "sum"}
    X, y, weights = data(12, 12 if output == "last" else 60)
    weights = weights if output == "last" else np.repeat(weights, 5)
    arguments = (solver, X, y, weights, [0.3, 3.0], True, options)
    assert relative_error(closed_form(*arguments, TorchBackend("cpu")), closed_form(*arguments)) < (
        1e-10
    )


@given(
    st.sampled_from(SOLVERS),
    st.integers(2, 25),
    st.integers(1, 3),
    st.sampled_from([1e-1, 1.0, 1e3]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_equals_refits_on_drawn_data(solver, n_samples, token_dim, alpha, fit_intercept, seed):
    random = np.random.default_rng(seed)
    X = random.standard_normal((n_samples, 4, token_dim))
    y = random.standard_normal((n_samples, 2))
    weights = random.uniform(0.1, 5.0, n_samples)
    computed = closed_form(solver, X, y, weights, [alpha], fit_intercept)
    assert relative_error(computed, refits(X, y, weights, [alpha], fit_intercept)) < 1e-9
