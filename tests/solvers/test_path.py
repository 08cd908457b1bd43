"""Solutions for many penalties at once against one factorisation for each."""

import numpy as np
import pytest
import reference
from reference import make_sequences, relative_error

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.solvers import (
    DualSolver,
    LeastSquaresProblem,
    MomentProblem,
    PrimalSolver,
    RidgePath,
)
from sklearn_mhla.solvers._path import Spectrum

ALPHAS = np.array([0.0, 1e-3, 1.0, 1e4])


def path_of(kind, X, y, weights, fit_intercept):
    design = Design(check_sequences(X), NumpyBackend(), rescale=False)
    problem = LeastSquaresProblem(design, y, weights, fit_intercept)
    if kind == "dual":
        return RidgePath(DualSolver(problem))
    if kind == "moments":
        return RidgePath(PrimalSolver(MomentProblem(problem.moments, fit_intercept)))
    return RidgePath(PrimalSolver(problem))


@pytest.mark.parametrize("kind", ["primal", "moments", "dual"])
@pytest.mark.parametrize("n_samples", [1, 2, 10, 40])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_equals_ridge(kind, n_samples, weighted, fit_intercept):
    random = np.random.default_rng(0)
    X, y = make_sequences(0.3, n_samples), 5.0 + random.standard_normal((n_samples, 3))
    weights = random.uniform(0.1, 5.0, n_samples) if weighted else None
    path = path_of(kind, X, y, weights, fit_intercept)
    coefs = path.coefficients(ALPHAS)
    intercepts = path.solver.intercept(coefs) + np.zeros((len(ALPHAS), 1))
    features = reference.feature_matrix(X)
    assert coefs.shape == (len(ALPHAS), 3, 18)
    assert intercepts.shape == (len(ALPHAS), 3)
    for alpha, coef, intercept in zip(ALPHAS, coefs, intercepts, strict=True):
        expected, constant = reference.ridge(features, y, alpha, fit_intercept, weights)
        predicted = features @ coef.T + intercept
        assert relative_error(predicted, features @ expected.T + constant) < 1e-9
        # Equal coefficients: nothing outside the span of the rows.
        assert np.linalg.norm(coef - expected) < 1e-7 * max(1.0, np.linalg.norm(expected))


@pytest.mark.parametrize("kind", ["primal", "moments", "dual"])
def test_minimum_norm_on_singular_data(kind):
    X, y = make_sequences(0.3, 40), np.random.default_rng(0).standard_normal((40, 2))
    X[:, :, 2] = X[:, :, 1]
    coef = path_of(kind, X, y, None, False).coefficients(np.zeros(1))[0]
    expected, _ = reference.ridge(reference.feature_matrix(X), y)
    assert relative_error(coef, expected) < 1e-8


@pytest.mark.parametrize("kind", ["primal", "moments", "dual"])
def test_features_of_zero(kind):
    X, y = np.zeros((4, 2, 3)), np.ones((4, 2))
    path = path_of(kind, X, y, None, True)
    coef = path.coefficients(ALPHAS)
    assert not coef.any()
    np.testing.assert_allclose(path.solver.intercept(coef) + 0.0 * coef[..., 0], 1.0)


def test_spectrum_leaves_out_what_is_rounding():
    matrix = np.diag([1.0, 1e-20, 1e-3])
    spectrum = Spectrum.of(matrix, 3, 0.0, NumpyBackend())
    np.testing.assert_allclose(
        spectrum.solutions(np.ones((3, 1)), np.array([0.0, 1.0]))[:, :, 0],
        [[1.0, 0.5], [0.0, 1.0], [1e3, 1.0 / 1.001]],
    )
