"""Associative memories."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import Heads, MHLARegressor, certify_identifiable, function_distance
from sklearn_mhla.datasets import make_associative_memory, make_key_value


@pytest.mark.parametrize("orthogonal", ["haar", "qr"])
@pytest.mark.parametrize("p_orthogonal", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_memories_are_pairs_a_query_and_noise(k, p_orthogonal, orthogonal):
    X, y, teacher = make_associative_memory(
        60, k, p_orthogonal=p_orthogonal, orthogonal=orthogonal, return_teacher=True, random_state=0
    )
    assert X.shape == (60, k + 1, 2 * k)
    assert y.shape == (60, k)
    assert reference.relative_error(y, reference.predict_heads(*teacher, X)) < 1e-13
    n_orthogonal = 0
    for sequence, target in zip(X, y, strict=True):
        keys, values, query, noise = (
            sequence[:k, :k],
            sequence[:k, k:],
            sequence[k, :k],
            sequence[k, k:],
        )
        np.testing.assert_allclose(np.linalg.norm(keys, axis=1), 1.0)
        np.testing.assert_allclose(np.linalg.norm(values, axis=1), 1.0)
        (asked,) = np.flatnonzero((keys == query).all(1))
        is_orthogonal = np.abs(keys @ keys.T - np.eye(k)).max() < 1e-12
        assert is_orthogonal == (np.abs(values @ values.T - np.eye(k)).max() < 1e-12)
        if is_orthogonal:
            n_orthogonal += 1
            np.testing.assert_allclose(target, values[asked] + noise, atol=1e-12)
    if k > 1:
        assert abs(n_orthogonal / 60 - p_orthogonal) < 4 * np.sqrt(0.25 / 60)
        assert n_orthogonal == 60 * p_orthogonal or 0.0 < p_orthogonal < 1.0


def test_queries_are_uniform_and_noise_is_normal():
    X, _ = make_associative_memory(6000, 3, p_orthogonal=0.5, random_state=0)
    asked = (X[:, :3, :3] == X[:, 3:, :3]).all(2).argmax(1)
    # Binomial with mean 2000 and standard deviation 37.
    assert np.abs(np.bincount(asked) - 2000).max() < 5 * 37
    noise = X[:, 3, 3:]
    assert noise.std() == pytest.approx(1.0, rel=0.03)
    assert abs(noise.mean()) < 0.04


def test_haar_matrices_are_uniform_and_those_of_qr_are_not():
    def rotated(orthogonal):
        X, _ = make_associative_memory(
            4000, 2, p_orthogonal=1.0, orthogonal=orthogonal, random_state=0
        )
        return np.linalg.det(X[:, :2, :2]), X[:, 0, 0]

    determinant, entry = rotated("haar")
    assert abs(determinant.mean()) < 5 / np.sqrt(4000)
    # An entry of a uniform matrix is the cosine of a uniform angle: mean 0, mean square 1/2.
    assert abs(entry.mean()) < 5 * np.sqrt(0.5 / 4000)
    assert (entry**2).mean() == pytest.approx(0.5, abs=5 * np.sqrt(0.125 / 4000))
    np.testing.assert_allclose(rotated("qr")[0], -1.0)


def test_published_teacher():
    *_, teacher = make_associative_memory(3, 2, return_teacher=True, random_state=0)
    assert isinstance(teacher, Heads)
    np.testing.assert_array_equal(teacher.value, [[[0, 0, 1, 0], [0, 0, 0, 1]]])
    np.testing.assert_array_equal(teacher.key_query, [np.diag([1, 1, 0, 0])])
    zero = (0.0 * teacher.value, teacher.key_query)
    assert function_distance(teacher, zero) == pytest.approx(2.0)


@pytest.mark.parametrize(("orthogonal", "nullity"), [("haar", 4), ("qr", 12)])
def test_the_certificate_predicts_recovery(orthogonal, nullity):
    smallest = []
    for p in (0.0, 0.5, 0.9, 0.95, 0.99, 1.0):
        X, y, teacher = make_associative_memory(
            2**14,
            p_orthogonal=p,
            orthogonal=orthogonal,
            return_teacher=True,
            random_state=0,
        )
        certificate = certify_identifiable(X)
        smallest.append(certificate.min_eigenvalue)
        distance = function_distance(MHLARegressor().fit(X, y), teacher)
        if p < 1.0:
            assert certificate
            assert distance < 1e-10
        else:
            assert certificate.nullity == nullity
            assert certificate.find_witness(y, random_state=0)
            # The teacher is the solution of minimum norm where matrices are uniform: it has no
            # part in the null space. That says nothing about other minimisers.
            assert (distance < 1e-10) == (orthogonal == "haar")
    assert smallest == sorted(smallest, reverse=True)
    assert smallest[-1] == 0.0
    # Lambda is a mixture, and its smallest eigenvalue is concave: not below (1 - p) times that of
    # Gaussian memories, but for sampling (164 memories at p = 0.99).
    gaussian = np.array([1.0, 0.5, 0.1, 0.05, 0.01]) * smallest[0]
    assert (np.array(smallest[:5]) >= 0.9 * gaussian).all()
    assert smallest[0] == pytest.approx(0.0677, rel=0.05)


@pytest.mark.parametrize("n_pairs", [None, 2])
def test_key_value_tables(n_pairs):
    X, y, teacher = make_key_value(200, 5, 3, n_pairs=n_pairs, return_teacher=True, random_state=0)
    n_pairs = n_pairs or 5
    assert X.shape == (200, n_pairs + 1, 8)
    assert y.shape == (200, 3)
    assert X.dtype == y.dtype == np.int8
    np.testing.assert_array_equal(reference.predict_heads(*teacher, X.astype(float)), y)
    for sequence, target in zip(X, y, strict=True):
        table = {}
        for token in sequence[:-1]:
            key, value = np.flatnonzero(token)
            table[key] = value - 5
        assert len(table) == n_pairs
        (query,) = np.flatnonzero(sequence[-1])
        assert target[table[query]] == target.sum() == 1


def test_keys_values_and_queries_are_uniform():
    X, y = make_key_value(6000, 4, 3, n_pairs=2, random_state=0)
    for counts in (X[:, 0, :4].sum(0), X[:, 1, :4].sum(0), X[:, 2, :4].sum(0)):
        # Binomial with mean 1500 and standard deviation 34.
        assert np.abs(counts - 1500).max() < 5 * 34
    assert np.abs(y.sum(0, dtype=int) - 2000).max() < 5 * 37


@pytest.mark.parametrize("make", [make_associative_memory, make_key_value])
def test_seeds(make):
    first, second, other = (
        make(20, random_state=3),
        make(20, random_state=3),
        make(20, random_state=4),
    )
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert not np.array_equal(first[0], other[0])
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    make(5, random_state=0)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_noise_of_the_targets():
    clean = make_associative_memory(4000, random_state=0)
    noisy = make_associative_memory(4000, noise=0.3, random_state=0)
    np.testing.assert_array_equal(clean[0], noisy[0])
    assert (noisy[1] - clean[1]).std() == pytest.approx(0.3, rel=0.04)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (make_associative_memory, {"n_samples": 0}),
        (make_associative_memory, {"n_pairs": 0}),
        (make_associative_memory, {"p_orthogonal": 1.5}),
        (make_associative_memory, {"p_orthogonal": float("nan")}),
        (make_associative_memory, {"orthogonal": "svd"}),
        (make_associative_memory, {"noise": -1.0}),
        (make_associative_memory, {"noise": float("inf")}),
        (make_key_value, {"n_samples": 0}),
        (make_key_value, {"n_keys": 0}),
        (make_key_value, {"n_values": 0}),
        (make_key_value, {"n_pairs": 0}),
        (make_key_value, {"n_pairs": 5}),
    ],
)
def test_numbers_out_of_range_are_named(make, wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        make(**wrong)
