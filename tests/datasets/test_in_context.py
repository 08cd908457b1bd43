"""In-context regression: layout, and the closed form of its best linear-attention read-out."""

from __future__ import annotations

import numpy as np
import pytest

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


@pytest.mark.parametrize("covariance", [None, [[2.0, 0.6], [0.6, 0.5]]])
def test_closed_form_of_the_documentation(covariance):
    """Least squares on the products of ``sum_i y_i x_i`` with ``x`` gives Gamma."""
    n, k = 6, 2
    X, y = make_in_context_regression(200_000, k, n, covariance=covariance, random_state=0)
    read = np.einsum("ni,nij->nj", X[:, :-1, k], X[:, :-1, :k])
    products = np.einsum("nj,nl->njl", read, X[:, -1, :k]).reshape(len(X), -1)
    gamma = np.linalg.lstsq(products, y)[0].reshape(k, k)
    sigma = np.eye(k) if covariance is None else np.array(covariance)
    expected = np.linalg.inv((n + 1) * sigma + np.trace(sigma) * np.eye(k))
    np.testing.assert_allclose(gamma, expected, atol=0.03 * np.abs(expected).max())


def test_inputs_have_the_covariance():
    sigma = np.array([[2.0, 0.6], [0.6, 0.5]])
    X, _ = make_in_context_regression(20_000, 2, 4, covariance=sigma, random_state=0)
    inputs = X[:, :, :2].reshape(-1, 2)
    np.testing.assert_allclose(inputs.T @ inputs / len(inputs), sigma, atol=0.03)


def test_errors():
    with pytest.raises(ValueError, match="noise"):
        make_in_context_regression(noise=-1.0)
    with pytest.raises(ValueError, match=r"shape \(4, 4\)"):
        make_in_context_regression(covariance=np.eye(3))
    with pytest.raises(ValueError, match="positive semidefinite"):
        make_in_context_regression(n_features=2, covariance=[[1.0, 2.0], [2.0, 1.0]])
