"""The nuclear-norm penalty: optimality, agreement of the two forms, the path."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla import Heads, MHLARegressor, function_distance, nuclear_norm_path
from sklearn_mhla._heads import coef_to_tensor
from sklearn_mhla.datasets import make_linear_attention


def data(noise=2.0, **options):
    return make_linear_attention(120, 8, 3, 2, 2, noise=noise, random_state=0, **options)


def objective(tensor, features, y, alpha, weights=None):
    """Half the residual sum of squares plus alpha times the nuclear norm, by definition."""
    j, k = np.triu_indices(3)
    scale = np.where(j == k, 1.0, np.sqrt(2.0))[:, None]
    coef = (0.5 * (tensor[:, j, k] + tensor[:, k, j]) * scale).reshape(len(tensor), -1)
    weights = np.ones(len(y)) if weights is None else weights
    squares = (weights[:, None] * (features @ coef.T - y) ** 2).sum()
    return 0.5 * squares + alpha * np.linalg.norm(tensor.reshape(6, 9), "nuc")


@pytest.mark.parametrize("method", ["primal", "dual"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.05])
def test_no_direction_lowers_the_objective(method, weighted, share):
    X, y = data()
    weights = np.random.default_rng(1).uniform(0.2, 2.0, len(X)) if weighted else None
    largest = nuclear_norm_path(X, y, n_alphas=1, sample_weight=weights).alphas[0]
    alpha = share * largest
    model = MHLARegressor(penalty="nuclear", alpha=alpha, method=method, tol=1e-10, max_iter=5000)
    model.fit(X, y, sample_weight=weights)
    assert model.dual_gap_ <= 1e-10
    features = reference.feature_matrix(X)
    best = np.einsum("haj,hkl->ajkl", model.value_, model.key_query_)
    value = objective(best, features, y, alpha, weights)
    assert model.loss_ == pytest.approx(value, rel=1e-9)
    random = np.random.default_rng(2)
    for _ in range(200):
        direction = random.standard_normal(best.shape)
        for step in (1e-4, 1e-2):
            moved = best + step * np.linalg.norm(best) * direction / np.linalg.norm(direction)
            assert objective(moved, features, y, alpha, weights) >= value * (1.0 - 1e-9)


@pytest.mark.parametrize("fit_intercept", [False, True])
def test_moments_and_rows_agree(fit_intercept):
    X, y = data()
    alpha = 0.1 * nuclear_norm_path(X, y, n_alphas=1).alphas[0]
    fits = [
        MHLARegressor(
            penalty="nuclear",
            alpha=alpha,
            method=method,
            fit_intercept=fit_intercept,
            tol=1e-12,
            max_iter=5000,
        ).fit(X, y)
        for method in ("primal", "dual")
    ]
    assert function_distance(*fits) < 1e-4 * np.linalg.norm(fits[0].coef_)
    assert np.allclose(fits[0].intercept_, fits[1].intercept_, atol=1e-3)


def test_largest_penalty_is_where_heads_appear():
    X, y = data()
    largest = nuclear_norm_path(X, y, n_alphas=1).alphas[0]
    cross = np.einsum("na,njk,nl->ajkl", y, X.mT @ X, X[:, -1])
    assert largest == pytest.approx(np.linalg.norm(cross.reshape(6, 9), 2), rel=1e-12)
    above = MHLARegressor(penalty="nuclear", alpha=1.001 * largest).fit(X, y)
    below = MHLARegressor(penalty="nuclear", alpha=0.99 * largest).fit(X, y)
    assert above.n_heads_ == 0
    assert not above.coef_.any()
    assert below.n_heads_ >= 1


def test_weak_penalty_tends_to_the_unpenalised_fit():
    X, y = data(noise=0.0)
    exact = MHLARegressor().fit(X, y)
    path = nuclear_norm_path(
        X, y, n_alphas=4, eps=1e-3, estimator=MHLARegressor(tol=1e-7, max_iter=5000)
    )
    distance = [np.linalg.norm(coef - exact.coef_) for coef in path.coefs]
    assert np.all(np.diff(distance) < 0)
    assert distance[-1] < 0.05 * np.linalg.norm(exact.coef_)


def test_path_agrees_with_single_fits():
    X, y = data()
    options = MHLARegressor(tol=1e-11, max_iter=5000, fit_intercept=True)
    path = nuclear_norm_path(X, y, n_alphas=4, eps=0.05, estimator=options)
    assert (np.diff(path.alphas) < 0).all()
    assert (path.dual_gaps <= 1e-11).all()
    for alpha, coef, n_heads in zip(path.alphas, path.coefs, path.n_heads, strict=True):
        model = options.set_params(penalty="nuclear", alpha=alpha).fit(X, y)
        assert np.linalg.norm(model.coef_ - coef) <= 1e-4 * np.linalg.norm(exact_scale(X, y))
        assert model.n_heads_ == n_heads


def exact_scale(X, y):
    return MHLARegressor(fit_intercept=True).fit(X, y).coef_


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**20])
def test_units_do_not_matter(factor):
    X, y = data()
    alpha = 0.1 * nuclear_norm_path(X, y, n_alphas=1).alphas[0]
    plain = MHLARegressor(penalty="nuclear", alpha=alpha).fit(X, y)
    tokens = MHLARegressor(penalty="nuclear", alpha=alpha * factor**3).fit(factor * X, y)
    targets = MHLARegressor(penalty="nuclear", alpha=alpha * factor).fit(X, factor * y)
    assert np.array_equal(tokens.coef_ * factor**3, plain.coef_)
    assert np.array_equal(targets.coef_, factor * plain.coef_)


def test_too_few_iterations_are_announced_with_the_gap():
    X, y = data()
    with pytest.warns(ConvergenceWarning, match=r"after 10 iterations.*duality gap of"):
        MHLARegressor(penalty="nuclear", alpha=1.0, max_iter=1).fit(X, y)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"alpha": 0.0}, "alpha > 0"),
        ({"alpha": 1.0, "n_heads": 2}, "n_heads=None"),
        ({"alpha": 1.0, "solver": "sgd"}, "solver='convex'"),
    ],
)
def test_contradictions_are_refused(params, message):
    X, y = data()
    with pytest.raises(ValueError, match=message):
        MHLARegressor(penalty="nuclear", **params).fit(X, y)
    with pytest.raises(ValueError, match="alphas"):
        nuclear_norm_path(X, y, alphas=[1.0, -1.0])


def test_few_noisy_rows_are_predicted_better_than_by_ridge():
    X, y, teacher = make_linear_attention(
        260, 16, 6, 6, 1, noise=2.0, return_teacher=True, random_state=0
    )
    size = np.linalg.norm(teacher.coefficients())
    ridge = min(
        function_distance(MHLARegressor(alpha=alpha).fit(X[:90], y[:90]), teacher)
        for alpha in np.logspace(0, 5, 11)
    )
    path = nuclear_norm_path(X[:90], y[:90], n_alphas=10, eps=0.01)
    nuclear = min(function_distance(Heads(*heads_of(coef)), teacher) for coef in path.coefs[1:])
    assert nuclear < 0.5 * ridge
    assert nuclear < 0.5 * size


def heads_of(coef):
    unfolded = coef_to_tensor(coef, 6).reshape(36, 36)
    left, singular, right = np.linalg.svd(unfolded)
    value = (left * singular).T.reshape(36, 6, 6)
    return value, right.reshape(36, 6, 6)
