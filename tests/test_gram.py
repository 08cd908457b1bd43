"""The packed Gram matrix against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import _gram
from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._features import cubic_features, full_state, packed_products
from sklearn_mhla._gram import accumulate_gram, gram_diagonal, query_products, unpack_gram
from sklearn_mhla._tokens import check_sequences

BACKEND = NumpyBackend()
ROUNDING = 1e-13


def symmetric(lower):
    """A symmetric matrix from its lower triangle, whatever stands above it."""
    return np.tril(lower) + np.tril(lower, -1).T


@pytest.mark.parametrize("token_dim", [1, 2, 3, 6])
@pytest.mark.parametrize("group_rows", [1, 3, 1024])
def test_packed_gram_unpacks_to_the_gram_matrix(monkeypatch, token_dim, group_rows):
    monkeypatch.setattr(_gram, "_GROUP_ROWS", group_rows)
    tokens = reference.make_sequences(0.2, 8, 4, token_dim)
    state, query = full_state(tokens, BACKEND), tokens[:, -1]
    pairs = state.shape[1]
    gram = np.zeros((pairs * (pairs + 1) // 2, pairs))
    for rows in (slice(0, 3), slice(3, 8)):  # accumulates, does not overwrite
        products = packed_products(query[rows], BACKEND)
        accumulate_gram(gram, state[rows], products, BACKEND)
    features = cubic_features(state, query[:, None])
    computed = symmetric(unpack_gram(gram, token_dim, BACKEND))
    assert reference.relative_error(computed, features.T @ features) < ROUNDING


def test_packed_gram_entries_are_those_of_the_definition():
    """``gram[(a, b), (l, k)] = sum_i s_a s_b q_l q_k`` with ``a <= b`` and ``l <= k``."""
    tokens = reference.make_sequences(0.2, 5, 4, 2)
    state, query = full_state(tokens, BACKEND), tokens[:, -1]
    gram = np.zeros((6, 3))
    accumulate_gram(gram, state, packed_products(query, BACKEND), BACKEND)
    expected = np.zeros((6, 3))
    for i in range(5):
        for row, (a, b) in enumerate([(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]):
            for column, (j, k) in enumerate([(0, 0), (0, 1), (1, 1)]):
                expected[row, column] += state[i, a] * state[i, b] * query[i, j] * query[i, k]
    assert reference.relative_error(gram, expected) < ROUNDING


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_queries_that_share_a_state_are_summed_first(weighted, ragged):
    X = reference.make_ragged([4, 1, 3], 3) if ragged else reference.make_sequences(0, 3, 4, 3)
    design = Design(check_sequences(X), BACKEND, output="sequence", causal=False, rescale=False)
    (block,) = design.blocks()
    assert block.query.shape == (3, 4, 3)
    random = np.random.default_rng(0)
    weights = random.uniform(0.1, 5.0, (design.n_rows, 1)) if weighted else None
    products = query_products(block, None if weights is None else block.gather(weights))
    w = np.ones((3, 4)) if weights is None else block.gather(weights)[..., 0]
    for i in range(3):
        expected = [
            sum(w[i, r] * block.query[i, r, j] * block.query[i, r, k] for r in range(4))
            for j in range(3)
            for k in range(j, 3)
        ]
        assert reference.relative_error(products[i], expected) < ROUNDING


def test_scaled_entries_and_the_diagonal():
    tokens = reference.make_sequences(0.2, 9, 4, 3)
    state, query = full_state(tokens, BACKEND, isometric=False), tokens[:, -1]
    gram = np.zeros((21, 6))
    accumulate_gram(gram, state, packed_products(query, BACKEND), BACKEND)
    published = [reference.published_features(*reference.states_and_queries(z)[0]) for z in tokens]
    isometric = [reference.isometric_features(*reference.states_and_queries(z)[0]) for z in tokens]
    plain, scaled = np.array(published), np.array(isometric)
    squared_scale = np.array([1.0, 2.0, 2.0, 1.0, 2.0, 1.0])
    computed = symmetric(unpack_gram(gram, 3, BACKEND, squared_scale))
    assert reference.relative_error(computed, scaled.T @ scaled) < ROUNDING
    assert reference.relative_error(gram_diagonal(gram, 3), (plain**2).sum(0)) < ROUNDING
