"""Factorisations of semidefinite matrices whose spectrum is known, on both backends."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._rounding import EPS, rank_tolerance
from sklearn_mhla.solvers._factor import (
    CholeskyFactor,
    RangeFactor,
    factorize,
    symmetric_one_norm,
)

BACKENDS = {"numpy": NumpyBackend, "torch": lambda: TorchBackend("cpu")}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]()


def with_spectrum(eigenvalues, order=None, seed=0):
    """Symmetric matrix with the given eigenvalues, filled up with zeros to ``order``."""
    order = len(eigenvalues) if order is None else order
    random = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(random.standard_normal((order, order)))
    basis = basis[:, : len(eigenvalues)]
    return (basis * eigenvalues) @ basis.T, basis


def builder(matrix, backend, calls=None):
    """A callable that builds the lower triangle afresh, with rubbish above the diagonal."""

    def build():
        if calls is not None:
            calls.append(1)
        lower = np.tril(matrix) + np.triu(np.full_like(matrix, 1e6), 1)
        return backend.asarray(lower)

    return build


def solve(factor, rhs, backend):
    return backend.to_numpy(factor.solve(backend.asarray(rhs)))


@pytest.mark.parametrize("order", [1, 2, 9])
@pytest.mark.parametrize("alpha", [0.0, 1e-3, 1e3])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_positive_definite_matrices_are_solved_by_cholesky(backend, order, alpha, scale):
    matrix, _ = with_spectrum(np.geomspace(1.0, 1e3, order))
    rhs = np.random.default_rng(1).standard_normal((order, 3))
    factor = factorize(builder(scale * matrix, backend), scale * alpha, order, 0.0, backend)
    assert isinstance(factor, CholeskyFactor)
    assert factor.rank == order
    expected = np.linalg.solve(matrix + alpha * np.eye(order), rhs)
    # condition 1e3 times eps
    assert reference.relative_error(solve(factor, scale * rhs, backend), expected) < 1e-11
    # A 1-norm estimate, within the factor order of the 2-norm condition number of the matrix
    # with a diagonal of about one.
    shifted = matrix + alpha * np.eye(order)
    unit = shifted / np.sqrt(np.outer(shifted.diagonal(), shifted.diagonal()))
    exact = np.linalg.cond(unit, 2)
    assert exact / 12 <= factor.condition <= 12 * order * exact


@pytest.mark.parametrize("alpha", [0.0, 1e-20, 1e-3, 1e3])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize(("order", "rank"), [(2, 1), (9, 1), (9, 4), (9, 8)])
def test_singular_matrices_give_the_solution_of_minimum_norm(backend, alpha, scale, order, rank):
    eigenvalues = np.geomspace(1.0, 1e2, rank)
    matrix, basis = with_spectrum(eigenvalues, order)
    inner = np.random.default_rng(1).standard_normal((rank, 2))
    factor = factorize(builder(scale * matrix, backend), scale * alpha, order, 0.0, backend)
    expected = basis @ (inner / (eigenvalues + alpha)[:, None])
    computed = solve(factor, scale * (basis @ inner), backend)
    assert reference.relative_error(computed, expected) < 1e-11
    if alpha <= 1e-20:
        assert isinstance(factor, RangeFactor)
        assert factor.rank == rank


def test_alpha_below_the_rounding_level_still_counts(backend):
    """A penalty of rounding size against an eigenvalue as small."""
    matrix = np.diag([1.0, 4e-14, 0.0])
    factor = factorize(builder(matrix, backend), 1e-14, 3, 0.0, backend)
    computed = solve(factor, np.array([[1.0], [1e-14], [0.0]]), backend)
    assert reference.relative_error(computed, [[1.0], [0.2], [0.0]]) < 1e-12


@pytest.mark.parametrize("alpha", [0.0, 1e-12])
def test_units_of_rows_and_columns_do_not_matter(backend, alpha):
    """Scaled by 1 to 1e-9, far beyond what eigenvalues of the whole could resolve."""
    matrix, _ = with_spectrum(np.array([1.0, 2.0, 5.0, 9.0]))
    scale = np.array([1.0, 1e-3, 1e-6, 1e-9])
    scaled = scale[:, None] * matrix * scale
    factor = factorize(builder(scaled, backend), alpha * 1e-18, 4, 0.0, backend)
    assert isinstance(factor, CholeskyFactor)
    expected = np.linalg.solve(matrix, np.ones((4, 1))) / scale[:, None]
    computed = solve(factor, scale[:, None], backend)
    assert np.allclose(computed, expected, rtol=1e-10 + 10 * alpha, atol=0.0)


def test_components_outside_the_range_are_ignored_without_alpha(backend):
    matrix, basis = with_spectrum(np.array([1.0, 2.0]), 5)
    inner = np.array([[1.0], [4.0]])
    outside = np.random.default_rng(3).standard_normal((5, 1))
    outside -= basis @ (basis.T @ outside)
    factor = factorize(builder(matrix, backend), 0.0, 5, 0.0, backend)
    computed = solve(factor, basis @ inner + outside, backend)
    assert reference.relative_error(computed, basis @ [[1.0], [2.0]]) < 1e-12


@pytest.mark.parametrize("order", [1, 4])
@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_zero_matrix(backend, order, alpha):
    factor = factorize(builder(np.zeros((order, order)), backend), alpha, order, 0.0, backend)
    computed = solve(factor, np.zeros((order, 2)), backend)
    assert np.array_equal(computed, np.zeros((order, 2)))
    if alpha == 0.0:
        assert factor.rank == 0
        assert np.array_equal(solve(factor, np.ones((order, 2)), backend), np.zeros((order, 2)))
    assert np.isfinite(factor.condition)


def test_rubbish_left_by_centring_is_not_information(backend):
    """Errors relative to the offset that was subtracted must not count as directions."""
    matrix, basis = with_spectrum(np.array([1.0, 3.0]), 6)
    noise = np.random.default_rng(4).standard_normal((6, 6))
    noisy = matrix + 1e-10 * (noise + noise.T)
    factor = factorize(builder(noisy, backend), 0.0, 6, 1e6, backend)
    assert factor.rank == 2
    computed = solve(factor, basis @ [[1.0], [3.0]], backend)
    assert reference.relative_error(computed, basis @ [[1.0], [1.0]]) < 1e-8
    # Without an offset the same numbers are six directions, if ill-conditioned ones.
    assert factorize(builder(matrix + 1e-6 * np.eye(6), backend), 0.0, 6, 0.0, backend).rank == 6


@pytest.mark.parametrize("order", [1, 2, 9])
@pytest.mark.parametrize("size", [1, 9])
def test_nothing_but_rubbish_is_rank_zero(backend, order, size):
    """Equal rows minus their mean: what is left is below the rounding level of the offset."""
    noise = np.random.default_rng(4).standard_normal((order, 2))
    rubbish = 1e-15 / order * noise @ noise.T  # offset 1: the level is 64 eps = 1.4e-14
    factor = factorize(builder(rubbish, backend), 0.0, size, 1.0, backend)
    assert factor.rank == 0
    assert not solve(factor, np.ones((order, 1)), backend).any()


def test_offset_counts_in_the_condition(backend):
    matrix, _ = with_spectrum(np.array([1.0, 2.0]))
    plain = factorize(builder(matrix, backend), 0.0, 2, 0.0, backend)
    centred = factorize(builder(matrix, backend), 0.0, 2, 1e6, backend)
    assert 1.0 <= plain.condition < 10.0
    assert 1e6 <= centred.condition < 1e7


@pytest.mark.parametrize("alpha", [0.0, 1e-30])
def test_a_matrix_that_turns_out_singular_is_built_again(backend, alpha):
    matrix, _ = with_spectrum(np.array([1.0, 2.0]), 4)
    calls = []
    factorize(builder(matrix, backend, calls), alpha, 4, 0.0, backend)
    assert len(calls) == 2
    calls.clear()
    factorize(builder(np.eye(4), backend, calls), alpha, 4, 0.0, backend)
    assert len(calls) == 1


def test_cholesky_is_not_tried_where_dimensions_say_singular(backend):
    matrix, _ = with_spectrum(np.array([1.0, 2.0]), 4)
    calls = []
    factor = factorize(builder(matrix, backend, calls), 0.0, 2, 0.0, backend)
    assert len(calls) == 1
    assert factor.rank == 2


def test_rank_tolerance_grows_slowly_with_the_smaller_side_only():
    assert rank_tolerance(1) == rank_tolerance(256) == 64 * EPS
    assert rank_tolerance(2176) == pytest.approx(4 * 2176**0.5 * EPS)
    # A direction at 1e-7 of the largest singular value counts at p = 16 896.
    assert rank_tolerance(16_896) < 2e-13


@pytest.mark.parametrize("order", [1, 3, 50, 2000])
def test_symmetric_one_norm_reads_the_lower_triangle(backend, order):
    random = np.random.default_rng(5)
    matrix = random.standard_normal((order, order))
    matrix = matrix + matrix.T
    computed = symmetric_one_norm(builder(matrix, backend)(), backend)
    assert computed == pytest.approx(np.linalg.norm(matrix, 1), rel=1e-13)
