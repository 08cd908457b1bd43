"""Moments accumulated block by block against sums over explicit feature rows."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import _design, _gram
from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._design import Design
from sklearn_mhla._sums import Sums
from sklearn_mhla._tokens import check_sequences

BACKEND = NumpyBackend()
# Sums over at most a few hundred rows, relative to the norm of the whole matrix.
ROUNDING = 1e-13

OUTPUTS = [
    pytest.param({"output": "last", "state": "sum"}, id="last-sum"),
    pytest.param({"output": "last", "state": "mean"}, id="last-mean"),
    pytest.param({"output": "sequence", "causal": True, "state": "sum"}, id="causal-sum"),
    pytest.param({"output": "sequence", "causal": True, "state": "mean"}, id="causal-mean"),
    pytest.param({"output": "sequence", "causal": False, "state": "sum"}, id="shared-sum"),
    pytest.param({"output": "sequence", "causal": False, "state": "mean"}, id="shared-mean"),
]


def symmetric(lower):
    """A symmetric matrix from its lower triangle, whatever stands above it."""
    return np.tril(lower) + np.tril(lower, -1).T


def check(X, options, n_outputs, weighted, backend=BACKEND):
    """Gram, cross, sums, weight and mean, plain and centred."""
    features = reference.feature_matrix(X, **options)
    random = np.random.default_rng(0)
    targets = random.standard_normal((len(features), n_outputs))
    weights = random.uniform(0.1, 5.0, (len(features), 1)) if weighted else None
    design = Design(check_sequences(X), backend, rescale=False, **options)
    moments = Sums.from_design(
        design, backend.asarray(targets), None if weights is None else backend.asarray(weights)
    )
    w = np.ones((len(features), 1)) if weights is None else weights
    mean = (w * features).sum(0) / w.sum()

    error = reference.relative_error
    assert error(moments.weight, w.sum()) < ROUNDING
    assert error(backend.to_numpy(moments.cross), (w * targets).T @ features) < ROUNDING
    assert error(backend.to_numpy(moments.feature_sum), (w * features).sum(0)) < ROUNDING
    assert error(backend.to_numpy(moments.mean()), mean[None]) < ROUNDING
    gram = features.T @ (w * features)
    assert error(symmetric(backend.to_numpy(moments.gram_matrix(None))), gram) < ROUNDING
    centred = (features - mean).T @ (w * (features - mean))
    computed = symmetric(backend.to_numpy(moments.gram_matrix(moments.mean())))
    # Centring by subtraction rounds relative to what it starts from.
    assert np.linalg.norm(computed - centred) <= ROUNDING * np.linalg.norm(gram)


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n_outputs", [1, 3])
@pytest.mark.parametrize(
    "name", ["one row", "one token", "width one", "wide", "array", "float32", "ragged", "zeros"]
)
def test_moments_equal_sums_over_rows(name, n_outputs, weighted, options):
    X = {
        "one row": lambda: reference.make_sequences(0.0, 1, 4, 2),
        "one token": lambda: reference.make_sequences(0.0, 9, 1, 3),
        "width one": lambda: reference.make_sequences(0.0, 9, 4, 1),
        "wide": lambda: reference.make_sequences(0.0, 6, 3, 7),
        "array": lambda: reference.make_sequences(1.0, 30, 5, 3),
        "float32": lambda: reference.make_sequences(1.0, 10, 5, 3).astype(np.float32),
        "ragged": lambda: reference.make_ragged([9, 1, 5, 2, 8, 3, 7, 4, 6, 1], 3),
        "zeros": lambda: np.zeros((4, 3, 2)),
    }[name]()
    check(X, options, n_outputs, weighted)


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("group_rows", [1, 4, 50])
def test_moments_over_many_blocks_and_many_groups(monkeypatch, options, group_rows):
    monkeypatch.setattr(_design, "_STATE_BUDGET", 0)
    monkeypatch.setattr(_design, "_MIN_ROWS", 7)
    monkeypatch.setattr(_gram, "_GROUP_ROWS", group_rows)
    lengths = np.random.default_rng(1).integers(1, 8, 40)
    check(reference.make_ragged(lengths, 3), options, 2, True)


@pytest.mark.parametrize("options", OUTPUTS)
def test_moments_in_torch(options):
    X = reference.make_ragged([9, 1, 5, 2, 8, 3], 3)
    check(X, options, 2, True, TorchBackend("cpu"))


def test_queries_and_weights_are_left_alone():
    X = reference.make_sequences(0.0, 6, 4, 3)
    weights, targets = np.full((6, 1), 3.0), np.ones((6, 2))
    before = X.copy()
    Sums.from_design(Design(check_sequences(X), BACKEND), targets, weights)
    assert np.array_equal(X, before)
    assert (weights == 3.0).all()
    assert (targets == 1.0).all()


def test_a_large_offset_does_not_leave_negative_moments():
    """float32 tokens around 10: the smallest eigenvalue is 4.875 of about 1e7, not negative."""
    X = reference.make_sequences(10, 20_000).astype(np.float32)
    moments = Sums.from_design(
        Design(check_sequences(X), BACKEND, rescale=False), np.zeros((20_000, 1)), None
    )
    # The published basis: no sqrt(2), divided by the number of rows.
    scale = np.repeat(np.where(np.equal(*np.triu_indices(3)), 1.0, np.sqrt(0.5)), 3)
    gram = symmetric(moments.gram_matrix(None)) * np.outer(scale, scale) / 20_000
    # eps times the norm (about 1e8) bounds what rounding can do: some 1e-7 absolute.
    assert np.linalg.eigvalsh(gram)[0] == pytest.approx(4.875, abs=5e-4)
