"""In-context regression: layout, and the closed form of its best linear-attention read-out."""

from __future__ import annotations

import numpy as np
import pytest

from sklearn_mhla import Heads, MHLARegressor, function_distance
from sklearn_mhla.datasets import make_in_context_regression


def test_layout():
    X, y, weights = make_in_context_regression(6, 3, 5, return_weights=True, random_state=0)
    for tokens, target, w in zip(X, y, weights, strict=True):
        for token in tokens[:-1]:
            assert token[3] == pytest.approx(sum(token[j] * w[j] for j in range(3)))
        assert tokens[-1, 3] == 0.0
        assert target == pytest.approx(sum(tokens[-1, j] * w[j] for j in range(3)))


def test_noise_is_in_the_examples_only():
    X, y, weights = make_in_context_regression(2000, 2, 4, 0.5, return_weights=True, random_state=0)
    residual = X[:, :-1, 2] - np.einsum("nid,nd->ni", X[:, :-1, :2], weights)
    assert residual.std() == pytest.approx(0.5, rel=0.05)
    np.testing.assert_allclose(y, np.einsum("nd,nd->n", X[:, -1, :2], weights))


SIGMA = np.array([[2.0, 0.6], [0.6, 0.5]])


def optimum(sigma, n, noise=0.0):
    """Gamma as a head, and its mean squared error, from the moments of Gaussian inputs.

    The error is quadratic in Gamma: ``tr(Sigma) - 2 tr(G^T E[M] Sigma) + tr(G^T E[M^2] G Sigma)``
    with ``n noise^2 tr(G^T Sigma G Sigma)`` added.
    """
    k = len(sigma)
    mean = n * sigma
    square = n * (n + 1) * sigma @ sigma + n * np.trace(sigma) * sigma + n * noise**2 * sigma
    gamma = np.linalg.solve(square, mean)
    value, key_query = np.zeros((1, 1, k + 1)), np.zeros((1, k + 1, k + 1))
    value[0, 0, k], key_query[0, :k, :k] = 1.0, gamma
    quadratic = np.trace(gamma.T @ square @ gamma @ sigma)
    error = np.trace(sigma) - 2 * np.trace(gamma.T @ mean @ sigma) + quadratic
    return Heads(value, key_query), error


@pytest.mark.parametrize("noise", [0.0, 1.5])
@pytest.mark.parametrize("sigma", [np.eye(2), SIGMA])
def test_closed_form_of_the_documentation(sigma, noise):
    """Least squares on the products of ``sum_i y_i x_i`` with ``x`` gives Gamma."""
    n, k = 6, 2
    X, y = make_in_context_regression(200_000, k, n, noise, covariance=sigma, random_state=0)
    read = np.einsum("ni,nij->nj", X[:, :-1, k], X[:, :-1, :k])
    products = np.einsum("nj,nl->njl", read, X[:, -1, :k]).reshape(len(X), -1)
    gamma = np.linalg.lstsq(products, y)[0].reshape(k, k)
    expected = np.linalg.inv((n + 1) * sigma + (np.trace(sigma) + noise**2) * np.eye(k))
    np.testing.assert_allclose(gamma, expected, atol=0.03 * np.abs(expected).max())
    head, error = optimum(sigma, n, noise)
    np.testing.assert_allclose(head.key_query[0, :k, :k], expected)
    assert error == pytest.approx(np.trace(sigma) - n * np.trace(sigma @ expected @ sigma))
    # The squared residual has a standard deviation of about three times its mean.
    assert np.mean((y - products @ expected.ravel()) ** 2) == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize("noise", [0.0, 1.5])
@pytest.mark.parametrize("sigma", [np.eye(2), SIGMA])
def test_linear_attention_learns_the_closed_form_and_nothing_else(sigma, noise):
    """The function distance counts every coefficient, those outside the block included."""
    k, n = 2, 6
    head, error = optimum(sigma, n, noise)
    size = function_distance(head, (0.0 * head.value, head.key_query))
    setting = {"n_features": k, "n_context": n, "noise": noise, "covariance": sigma}
    X_new, _ = make_in_context_regression(5000, **setting, random_state=1000)
    read = np.einsum("ni,nij->nj", X_new[:, :-1, k], X_new[:, :-1, :k])
    best = np.einsum("nj,jl,nl->n", read, head.key_query[0, :k, :k], X_new[:, -1, :k])
    distances, excess = [], []
    for rows in (500, 8000, 128_000):  # each a factor 4 in the distance, 16 in the excess error
        trials = []
        for seed in range(3):
            model = MHLARegressor().fit(
                *make_in_context_regression(rows, **setting, random_state=seed)
            )
            difference = np.mean((model.predict(X_new) - best) ** 2)
            trials.append([function_distance(model, head) / size, difference / error])
        distance, difference = np.median(trials, axis=0)
        distances.append(distance)
        excess.append(difference)
    assert distances[-1] < 0.05
    assert excess[-1] < 1e-3
    assert np.log(distances[0] / distances[-1]) / np.log(256) == pytest.approx(0.5, abs=0.12)
    assert np.log(excess[0] / excess[-1]) / np.log(256) == pytest.approx(1.0, abs=0.2)


def test_coefficients_of_the_label_of_the_query_are_zero():
    X, y = make_in_context_regression(200, 2, 6, random_state=0)
    coef = MHLARegressor().fit(X, y).coef_.reshape(-1, 3)
    assert np.abs(coef[:, 2]).max() < 1e-14
    assert np.abs(coef[:, :2]).min() > 1e-5


def test_inputs_have_the_covariance():
    X, _ = make_in_context_regression(20_000, 2, 4, covariance=SIGMA, random_state=0)
    inputs = X[:, :, :2].reshape(-1, 2)
    np.testing.assert_allclose(inputs.T @ inputs / len(inputs), SIGMA, atol=0.03)


def test_errors():
    with pytest.raises(ValueError, match="noise"):
        make_in_context_regression(noise=-1.0)
    with pytest.raises(ValueError, match=r"shape \(4, 4\)"):
        make_in_context_regression(covariance=np.eye(3))
    with pytest.raises(ValueError, match="positive semidefinite"):
        make_in_context_regression(n_features=2, covariance=[[1.0, 2.0], [2.0, 1.0]])
