"""Fits with a fixed number of heads."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla import Heads, MHLARegressor, function_distance
from sklearn_mhla._heads import coef_to_tensor, tensor_to_heads
from sklearn_mhla.datasets import make_linear_attention
from sklearn_mhla.solvers._head_equations import CoefficientEquations
from sklearn_mhla.solvers._low_rank import alternating_least_squares, levenberg_marquardt


def relative_distance(model, teacher):
    return function_distance(model, teacher) / np.linalg.norm(teacher.coefficients())


@pytest.mark.parametrize("method", ["primal", "dual"])
@pytest.mark.parametrize("fit_intercept", [False, True])
@pytest.mark.parametrize(
    ("d", "n_outputs", "n_heads"), [(2, 2, 1), (4, 1, 2), (4, 4, 3), (6, 6, 4), (8, 3, 2)]
)
def test_plentiful_rows_recover_the_teacher(d, n_outputs, n_heads, fit_intercept, method):
    n_samples = 2 * d * d * (d + 1) // 2 + 4
    X, y, teacher = make_linear_attention(
        n_samples, 10, d, n_outputs, n_heads, return_teacher=True, random_state=0
    )
    model = MHLARegressor(n_heads, method=method, fit_intercept=fit_intercept, random_state=0)
    model.fit(X, y + 3.0 * fit_intercept)
    assert model.method_ == method
    assert model.n_heads_ == n_heads
    assert relative_distance(model, teacher) < 1e-9
    assert np.allclose(model.intercept_, 3.0 * fit_intercept, atol=1e-8)
    assert model.gradient_norm_ < 1e-12


@pytest.mark.parametrize(
    ("d", "n_outputs", "n_heads", "per_unknown"),
    [(6, 3, 1, 3), (8, 4, 2, 3), (8, 8, 4, 3), (16, 4, 1, 3), (16, 4, 2, 2)],
)
def test_scarce_rows_recover_the_teacher(d, n_outputs, n_heads, per_unknown):
    unknowns = n_heads * (n_outputs * d + d * d)
    n_samples = -(-per_unknown * unknowns // n_outputs)
    assert n_samples < d * d * (d + 1) // 2 or d <= 8
    X, y, teacher = make_linear_attention(
        n_samples, 64, d, n_outputs, n_heads, return_teacher=True, random_state=0
    )
    model = MHLARegressor(n_heads, method="dual", random_state=0).fit(X, y)
    assert relative_distance(model, teacher) < 1e-10
    fresh, _ = make_linear_attention(100, 64, d, n_outputs, n_heads, random_state=1)
    expected = reference_predictions(teacher, fresh)
    assert reference.relative_error(model.predict(fresh).reshape(expected.shape), expected) < 1e-10


def reference_predictions(teacher, X):
    return np.einsum(
        "haj,nsj,nsk,hkl,nl->na", teacher.value, X, X, teacher.key_query, X[:, -1], optimize=True
    )


@pytest.mark.parametrize("method", ["primal", "dual"])
@pytest.mark.parametrize("alpha", [0.0, 50.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_noisy_fit_reaches_what_a_general_optimiser_reaches(method, alpha, weighted):
    d, n_outputs, n_heads, n_samples = 3, 2, 1, 60
    X, y = make_linear_attention(n_samples, 6, d, n_outputs, 2, noise=2.0, random_state=0)
    weight = np.random.default_rng(1).uniform(0.5, 2.0, n_samples) if weighted else None
    model = MHLARegressor(n_heads, method=method, alpha=alpha, random_state=0)
    model.fit(X, y, sample_weight=weight)
    scale = np.ones(n_samples) if weight is None else weight

    def objective(flat):
        heads = Heads(flat[:6].reshape(1, 2, 3), flat[6:].reshape(1, 3, 3))
        residual = reference_predictions(heads, X) - y
        penalty = alpha * (heads.coefficients() ** 2).sum()
        return 0.5 * ((scale[:, None] * residual**2).sum() + penalty)

    random = np.random.default_rng(2)
    best = min(
        minimize(
            objective, random.standard_normal(15), method="L-BFGS-B", options={"maxiter": 5000}
        ).fun
        for _ in range(8)
    )
    ours = objective(np.concatenate([model.value_.ravel(), model.key_query_.ravel()]))
    assert ours <= best * (1 + 1e-6)
    # loss_ is in the units of the design, whose targets are the user's own
    assert model.loss_ == pytest.approx(ours, rel=1e-9)


def test_moments_and_rows_agree():
    X, y = make_linear_attention(300, 8, 4, 3, 3, noise=1.0, random_state=0)
    fits = [
        MHLARegressor(
            2, method=method, alpha=1.0, fit_intercept=True, tol=1e-14, random_state=0
        ).fit(X, y)
        for method in ("primal", "dual")
    ]
    assert function_distance(*fits) < 1e-5 * np.linalg.norm(fits[0].coef_)
    assert fits[0].loss_ == pytest.approx(fits[1].loss_, rel=1e-9)


@pytest.mark.parametrize("n_heads", [4, 9, 50])
def test_enough_heads_are_no_restriction(n_heads):
    X, y = make_linear_attention(100, 8, 2, 2, 3, noise=1.0, random_state=0)
    limited = MHLARegressor(n_heads).fit(X, y)
    assert function_distance(limited, MHLARegressor().fit(X, y)) == 0.0
    assert limited.n_heads_ <= 4


def test_not_converged_says_so_with_the_gap():
    X, y = make_linear_attention(300, 8, 4, 3, 3, noise=5.0, random_state=0)
    with pytest.warns(ConvergenceWarning, match=r"2 heads stopped after 1 steps.*gradient"):
        MHLARegressor(2, max_iter=1, tol=1e-14, random_state=0).fit(X, y)


def test_same_seed_same_heads():
    X, y = make_linear_attention(300, 8, 4, 3, 3, noise=5.0, random_state=0)
    first, second = (MHLARegressor(2, random_state=7).fit(X, y) for _ in range(2))
    assert np.array_equal(first.value_, second.value_)
    assert np.array_equal(first.key_query_, second.key_query_)


@pytest.mark.parametrize("factor", [2.0**-40, 1e-4, 1e4, 2.0**40])
def test_units_of_the_tokens_do_not_matter(factor):
    X, y = make_linear_attention(40, 8, 4, 3, 1, random_state=0)
    model = MHLARegressor(1, random_state=0).fit(X, y)
    scaled = MHLARegressor(1, random_state=0).fit(factor * X, y)
    assert reference.relative_error(scaled.coef_ * factor**3, model.coef_) < 1e-10


@pytest.mark.parametrize("bad", [0, -1, 1.5, "two"])
def test_number_of_heads_is_validated(bad):
    X, y = make_linear_attention(20, 4, 3, random_state=0)
    with pytest.raises((ValueError, TypeError), match="n_heads"):
        MHLARegressor(bad).fit(X, y)


@pytest.mark.parametrize("solver", [levenberg_marquardt, alternating_least_squares])
def test_loss_never_rises_and_an_exact_fit_is_recognised(solver):
    teacher = Heads(*reference.make_heads(2, 3, 4))
    target = coef_to_tensor(teacher.coefficients(), 4)
    metric = CoefficientEquations(target)
    scale = 0.5 * (target**2).sum()
    start = tensor_to_heads(target, 2)
    previous = metric.loss(start)
    for max_iter in (1, 2, 4, 8):
        fit = solver(metric, start, scale=scale, max_iter=max_iter)
        assert fit.loss <= previous
        previous = fit.loss
    final = solver(metric, start, scale=scale, max_iter=5000, tol=1e-14)
    assert final.converged
    assert final.loss < 1e-10 * scale
    assert metric.loss(teacher) < 1e-28 * scale


def test_convergence_is_quadratic_on_exact_data():
    # From a start that is nearly right, every step squares the error of the coefficients.
    teacher = Heads(*reference.make_heads(2, 4, 4))
    target = coef_to_tensor(teacher.coefficients(), 4)
    metric = CoefficientEquations(target)
    random = np.random.default_rng(0)
    near = Heads(
        teacher.value + 1e-3 * random.standard_normal(teacher.value.shape),
        teacher.key_query + 1e-3 * random.standard_normal(teacher.key_query.shape),
    )
    fit = levenberg_marquardt(metric, near, scale=0.5 * (target**2).sum())
    assert fit.converged
    assert fit.n_iter <= 6
