"""Orthogonal factorisations: triangles against LAPACK, fits of ill-conditioned features."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from scipy.linalg import lstsq
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla import MHLARegressor
from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._rounding import rank_tolerance
from sklearn_mhla.solvers import _orthogonal
from sklearn_mhla.solvers._orthogonal import pseudo_inverse, triangle_of_rows

METHODS = ["primal", "dual"]


@pytest.fixture(params=["numpy", "torch"])
def backend(request):
    if request.param == "numpy":
        return NumpyBackend()
    pytest.importorskip("torch")
    return TorchBackend("cpu")


@pytest.mark.parametrize("lengths", [[1], [3], [5], [20], [21], [7, 1, 30, 2, 50], [1] * 41])
def test_triangle_of_rows_in_blocks(backend, lengths):
    random = np.random.default_rng(1)
    parts = [random.standard_normal((length, 5)) for length in lengths]
    triangle = triangle_of_rows((backend.asarray(part) for part in parts), 5, backend)
    triangle = backend.to_numpy(triangle)
    rows = np.concatenate(parts)
    assert triangle.shape == (min(len(rows), 5), 5)
    assert not np.tril(triangle, -1).any()
    # Unique up to the signs of its rows.
    expected = np.linalg.qr(rows, mode="r")
    assert reference.relative_error(np.abs(triangle), np.abs(expected)) < 1e-13


def test_small_singular_values_of_the_rows_survive(backend):
    random = np.random.default_rng(1)
    left, _ = np.linalg.qr(random.standard_normal((300, 6)))
    right, _ = np.linalg.qr(random.standard_normal((6, 6)))
    singular = np.geomspace(1.0, 1e-12, 6)
    rows = left * singular @ right.T
    triangle = triangle_of_rows(
        iter(backend.asarray(rows[i : i + 7]) for i in range(0, 300, 7)), 6, backend
    )
    computed = np.linalg.svd(backend.to_numpy(triangle), compute_uv=False)
    assert np.allclose(computed, singular, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize(("shape", "rank"), [((9, 5), 5), ((5, 5), 4), ((4, 7), 4), ((6, 4), 2)])
def test_pseudo_inverse(backend, shape, rank, alpha):
    random = np.random.default_rng(1)
    matrix = random.standard_normal((shape[0], rank)) @ random.standard_normal((rank, shape[1]))
    inverse = pseudo_inverse(
        backend.asarray(matrix), alpha, rank_tolerance(min(shape)), 0.0, backend
    )
    assert inverse.rank == rank
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    rhs, rhs_square = random.standard_normal((shape[0], 2)), random.standard_normal((shape[1], 2))
    expected = vt.T @ ((s / (s**2 + alpha))[:, None] * (u.T @ rhs))
    solution = backend.to_numpy(inverse.solve(backend.asarray(rhs)))
    assert reference.relative_error(solution, expected) < 1e-11
    expected = vt.T @ ((vt @ rhs_square) / (s**2 + alpha)[:, None])
    solution = backend.to_numpy(inverse.solve_square(backend.asarray(rhs_square)))
    assert reference.relative_error(solution, expected) < 1e-11


def test_zero_matrix_has_no_directions(backend):
    inverse = pseudo_inverse(backend.zeros((4, 3)), 0.0, 1e-14, 0.0, backend)
    assert inverse.rank == 0
    assert inverse.condition == 1.0
    assert not backend.to_numpy(inverse.solve(backend.zeros((4, 1)) + 1.0)).any()


def test_units_of_columns_do_not_matter(backend):
    random = np.random.default_rng(1)
    matrix, scale = random.standard_normal((9, 4)), np.array([1.0, 1e-10, 1e-20, 1e5])
    rhs = random.standard_normal((9, 1))
    scaled = backend.asarray(matrix * scale)
    inverse = pseudo_inverse(scaled, 0.0, 1e-14, 0.0, backend, (scaled**2).sum(0))
    solution = backend.to_numpy(inverse.solve(backend.asarray(rhs)))
    expected = np.linalg.lstsq(matrix, rhs)[0]
    assert reference.relative_error(solution * scale[:, None], expected) < 1e-12


def test_columns_of_nothing_but_rounding_do_not_count(backend):
    random = np.random.default_rng(1)
    matrix = random.standard_normal((9, 4)) * np.array([1.0, 1e-16, 1.0, 1.0])
    bounds = backend.zeros((4,)) + 9.0
    inverse = pseudo_inverse(backend.asarray(matrix), 0.0, 1e-14, 0.0, backend, bounds)
    assert inverse.rank == 3


def nearly_dependent(n_samples, token_dim, noise):
    """The second coordinate is the first plus noise: products of three resolve its cube."""
    random = np.random.default_rng(0)
    X = random.standard_normal((n_samples, 5, token_dim))
    X[:, :, 1] = X[:, :, 0] + noise * X[:, :, 1]
    return X


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("kind", ["exact", "noisy"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("fit_intercept", [False, True], ids=["through 0", "intercept"])
@pytest.mark.parametrize(
    ("n_samples", "token_dim", "noise"), [(200, 3, 1.2e-3), (60, 4, 1e-3), (30, 4, 5e-4)]
)
def test_features_of_condition_1e10(
    n_samples, token_dim, noise, fit_intercept, weighted, kind, method
):
    X = nearly_dependent(n_samples, token_dim, noise)
    features = reference.feature_matrix(X)
    random = np.random.default_rng(3)
    weights = random.uniform(0.5, 2.0, n_samples) if weighted else np.ones(n_samples)
    if n_samples > features.shape[1]:
        assert 3e9 < np.linalg.cond(features) < 1e11
    y = features @ random.standard_normal((features.shape[1], 2)) + 3.0 * fit_intercept
    if kind == "noisy":
        y += random.standard_normal(y.shape)
    root = np.sqrt(weights)[:, None]
    mean, shift = 0.0, 0.0
    if fit_intercept:
        mean = np.average(features, axis=0, weights=weights)
        shift = np.average(y, axis=0, weights=weights)
    expected = lstsq(root * (features - mean), root * (y - shift), cond=1e-14)[0].T
    model = MHLARegressor(method=method, fit_intercept=fit_intercept)
    model.fit(X, y, sample_weight=weights if weighted else None)
    assert model.rank_ == min(n_samples - fit_intercept, features.shape[1])
    predicted = (features - mean) @ expected.T + shift
    assert reference.relative_error(model.predict(X), predicted) < 1e-5
    assert reference.relative_error(model.coef_, expected) < 1e-5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    [
        {"output": "sequence"},
        {"output": "sequence", "causal": False},
        {"output": "sequence", "causal": False, "state": "mean"},
    ],
    ids=["causal", "shared", "shared mean"],
)
def test_ragged_sequences_of_outputs(method, options):
    random = np.random.default_rng(0)
    X = reference.make_ragged([9, 1, 5, 2, 8, 3, 7, 4, 6, 1] * 4, 3)
    for sequence in X:
        sequence[:, 1] = sequence[:, 0] + 1e-3 * sequence[:, 1]
    features = reference.feature_matrix(X, **options)
    assert np.linalg.cond(features) > 3e9
    y = random.standard_normal((len(features), 2))
    expected = lstsq(features, y, cond=1e-14)[0].T
    targets = np.split(y, np.cumsum([len(sequence) for sequence in X])[:-1])
    model = MHLARegressor(method=method, **options).fit(X, targets)
    assert model.rank_ == 18
    assert reference.relative_error(model.coef_, expected) < 1e-5
    assert reference.relative_error(np.concatenate(model.predict(X)), features @ expected.T) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_a_small_penalty_on_hidden_directions(method):
    """Below the level of the normal equations' rounding, above that of small directions."""
    X = nearly_dependent(200, 3, 1.2e-3)
    features = reference.feature_matrix(X)
    u, s, vt = np.linalg.svd(features, full_matrices=False)
    alpha = float(s[-3] * s[-2])
    y = np.random.default_rng(3).standard_normal((200, 2))
    expected = ((s / (s**2 + alpha))[:, None] * (u.T @ y)).T @ vt
    model = MHLARegressor(method=method, alpha=alpha).fit(X, y)
    assert reference.relative_error(model.coef_, expected) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_exactly_dependent_coordinates_need_no_orthogonal_factorisation(method, monkeypatch):
    monkeypatch.delattr(_orthogonal, "pseudo_inverse")
    monkeypatch.setattr(NumpyBackend, "triangle", None)
    X = reference.make_sequences(0.0, 60, 5, 2)
    for tokens in (X[:, :, [0, 1, 1]], reference.make_sequences(0.0, 60, 1)):
        y = np.random.default_rng(7).standard_normal((60, 1))
        expected = lstsq(reference.feature_matrix(tokens), y, cond=1e-9)[0].T
        model = MHLARegressor(method=method).fit(tokens, y)
        assert reference.relative_error(model.coef_, expected) < 1e-8


@pytest.mark.parametrize("method", METHODS)
def test_hidden_directions_are_reported_where_memory_is_short(method, monkeypatch):
    X = nearly_dependent(60, 3, 1.2e-3)
    y = np.random.default_rng(7).standard_normal((60, 1))
    # Enough for moments or kernel and for the eigenvectors of either.
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 8 * 10 * 60**2)
    monkeypatch.setattr(_orthogonal, "_BUFFER", 10**4)
    with pytest.warns(ConvergenceWarning, match=r"singular values of the order of .*e-.*left out"):
        model = MHLARegressor(method=method).fit(X, y)
    assert model.rank_ < 18
