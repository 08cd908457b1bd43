"""Packed states, cubic features and their products against the definitions in loops."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._features import (
    adjoint_block,
    cubic_features,
    full_state,
    n_cubic_features,
    n_pairs,
    packed_products,
    pair_indices,
    pair_scale,
    predict_block,
    prefix_states,
    svec,
)

BACKEND = NumpyBackend()
# A few hundred additions of numbers of order one: 1e-13 leaves a factor of ten or more.
ROUNDING = 1e-13


def block(token_dim, n_samples=4, n_tokens=5, n_queries=1, seed=3):
    """States of random sequences and their last ``n_queries`` tokens as queries."""
    tokens = reference.make_sequences(0.3, n_samples, n_tokens, token_dim, seed)
    return tokens, full_state(tokens, BACKEND), tokens[:, -n_queries:]


@pytest.mark.parametrize("token_dim", [1, 2, 3, 7])
def test_counts_are_those_of_the_loops(token_dim):
    pairs = [(j, k) for j in range(token_dim) for k in range(j, token_dim)]
    assert n_pairs(token_dim) == len(pairs)
    assert n_cubic_features(token_dim) == len(pairs) * token_dim
    assert list(zip(*(index.tolist() for index in pair_indices(token_dim)), strict=True)) == pairs
    assert pair_scale(token_dim).tolist() == [1.0 if j == k else 2**0.5 for j, k in pairs]


def test_shared_index_tables_cannot_be_written_to():
    for table in (*pair_indices(3), pair_scale(3)):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 5


@pytest.mark.parametrize("token_dim", [1, 2, 3, 5])
@pytest.mark.parametrize("n_tokens", [1, 2, 9])
def test_cubic_features_are_those_of_the_definition(token_dim, n_tokens):
    tokens, state, query = block(token_dim, n_tokens=n_tokens)
    expected = [
        reference.isometric_features(reference.state_matrix(sequence), sequence[-1])
        for sequence in tokens
    ]
    assert reference.relative_error(cubic_features(state, query), expected) < ROUNDING


@pytest.mark.parametrize("token_dim", [1, 2, 4])
def test_published_features_differ_by_sqrt_two_off_the_diagonal(token_dim):
    tokens, state, query = block(token_dim)
    unscaled = cubic_features(state / pair_scale(token_dim), query)
    expected = [
        reference.published_features(reference.state_matrix(sequence), sequence[-1])
        for sequence in tokens
    ]
    assert reference.relative_error(unscaled, expected) < ROUNDING


@pytest.mark.parametrize("token_dim", [1, 2, 4])
def test_inner_products_of_features_are_the_kernel(token_dim):
    tokens, state, query = block(token_dim, n_samples=6)
    features = cubic_features(state, query)
    pairs = [reference.states_and_queries(sequence)[0] for sequence in tokens]
    expected = [[reference.kernel(pair, other) for other in pairs] for pair in pairs]
    assert reference.relative_error(features @ features.T, expected) < ROUNDING


def test_published_features_and_function_coefficients_give_the_prediction():
    """Three loops that share no line: V S Q q, <p(Theta), H(Z)> and <coef, phi(Z)>."""
    value, key_query = reference.make_heads(2, 3, 4)
    p_theta = reference.function_coefficients(value, key_query)
    for sequence in reference.make_sequences(0.0, 5, 6, 4):
        state, query = reference.states_and_queries(sequence)[0]
        expected = reference.heads_output(value, key_query, state, query)
        through_monomials = p_theta @ reference.published_features(state, query)
        assert reference.relative_error(through_monomials, expected) < ROUNDING


@pytest.mark.parametrize("output", ["last", "sequence"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("state", ["sum", "mean"])
def test_the_reference_feature_matrix_agrees_with_loops_over_entries(output, causal, state):
    sequences = reference.make_ragged([3, 1, 5], 3)
    expected = [
        reference.isometric_features(*pair)
        for sequence in sequences
        for pair in reference.states_and_queries(sequence, output, causal, state)
    ]
    features = reference.feature_matrix(sequences, output, causal, state)
    assert reference.relative_error(features, expected) < ROUNDING


@pytest.mark.parametrize("token_dim", [1, 3, 6])
def test_svec_is_an_isometry(token_dim):
    random = np.random.default_rng(0)
    matrices = random.standard_normal((5, token_dim, token_dim))
    matrices = matrices + matrices.mT
    packed = svec(matrices, BACKEND)
    frobenius = np.array([[float((a * b).sum()) for b in matrices] for a in matrices])
    assert packed.shape == (5, n_pairs(token_dim))
    assert reference.relative_error(packed @ packed.T, frobenius) < ROUNDING


@pytest.mark.parametrize("token_dim", [1, 2, 5])
def test_packed_products_have_no_sqrt_two(token_dim):
    vectors = np.random.default_rng(0).standard_normal((4, token_dim))
    expected = [
        [v[j] * v[k] for j in range(token_dim) for k in range(j, token_dim)] for v in vectors
    ]
    assert np.array_equal(packed_products(vectors, BACKEND), expected)


@pytest.mark.parametrize("token_dim", [1, 2, 4])
@pytest.mark.parametrize("n_tokens", [1, 2, 7])
def test_prefix_states_are_states_of_prefixes(token_dim, n_tokens):
    tokens = reference.make_sequences(0.0, 3, n_tokens, token_dim)
    states = prefix_states(tokens, BACKEND)
    upper = np.triu_indices(token_dim)
    expected = [
        [
            reference.state_matrix(sequence[: t + 1])[upper] * pair_scale(token_dim)
            for t in range(n_tokens)
        ]
        for sequence in tokens
    ]
    assert reference.relative_error(states, expected) < ROUNDING
    assert reference.relative_error(states[:, -1], full_state(tokens, BACKEND)) < ROUNDING


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_prefix_states_continue_a_sequence_that_was_cut(cut):
    tokens = reference.make_sequences(0.0, 3, 7, 3)
    whole = prefix_states(tokens, BACKEND)
    first = prefix_states(tokens[:, :cut], BACKEND)
    second = prefix_states(tokens[:, cut:], BACKEND, first[:, -1].copy())
    joined = np.concatenate([first, second], axis=1)
    assert reference.relative_error(joined, whole) < ROUNDING


def test_states_do_not_write_into_the_tokens():
    tokens = reference.make_sequences(0.0, 3, 4, 3)
    before = tokens.copy()
    full_state(tokens, BACKEND)
    prefix_states(tokens, BACKEND)
    packed_products(tokens[:, 0], BACKEND)
    assert np.array_equal(tokens, before)


@pytest.mark.parametrize("token_dim", [1, 2, 5])
@pytest.mark.parametrize("n_queries", [1, 3])
@pytest.mark.parametrize("n_outputs", [1, 4])
@pytest.mark.parametrize("n_samples", [1, 6])
def test_products_with_a_block_equal_those_with_its_features(
    token_dim, n_queries, n_outputs, n_samples
):
    _, state, query = block(token_dim, n_samples, n_queries=n_queries)
    features = cubic_features(state, query)
    random = np.random.default_rng(5)
    coef = random.standard_normal((n_outputs, features.shape[1]))
    dual = random.standard_normal((n_samples, n_queries, n_outputs))

    predicted = predict_block(state, query, coef)
    assert predicted.shape == (n_samples, n_queries, n_outputs)
    expected = (features @ coef.T).reshape(predicted.shape)
    assert reference.relative_error(predicted, expected) < ROUNDING

    adjoint = adjoint_block(state, query, dual)
    expected = dual.reshape(-1, n_outputs).T @ features
    assert reference.relative_error(adjoint, expected) < ROUNDING


def test_cubic_features_order_rows_by_state_then_query():
    tokens, state, query = block(3, n_samples=2, n_queries=2)
    features = cubic_features(state, query)
    for row, (i, r) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        expected = reference.isometric_features(
            reference.state_matrix(tokens[i]), tokens[i, -2 + r]
        )
        assert reference.relative_error(features[row], expected) < ROUNDING


def test_products_without_any_pair():
    """What is left of inputs that are all zero once unused pairs are left out."""
    state, query = np.empty((5, 0)), np.zeros((5, 2, 3))
    assert adjoint_block(state, query, np.ones((5, 2, 4))).shape == (4, 0)
    np.testing.assert_array_equal(
        predict_block(state, query, np.empty((4, 0))), np.zeros((5, 2, 4))
    )
