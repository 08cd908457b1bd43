"""Automata in context: rows that determine every prediction of interest, and not the model.

An automaton with 4 states and 2 symbols is a table of 8 joint keys (state, symbol) and 4 values,
the next states. Inputs hold the table and ask for one entry.
"""

import numpy as np
import pytest

from sklearn_mhla import MHLARegressor, certify_identifiable
from sklearn_mhla.datasets import FiniteAutomaton, make_key_value

N_STATES, N_SYMBOLS = 4, 2
N_KEYS = N_STATES * N_SYMBOLS
# Span of all such inputs: per key of the query, a constant and one number per key and value that
# is free given the sum over values.
RANK = N_KEYS * (1 + N_KEYS * (N_STATES - 1))


def tables(n_samples, seed):
    return make_key_value(n_samples, N_KEYS, N_STATES, random_state=seed)


def tokens(automaton, state, symbol):
    """Transition table in order, and the query, written down entry by entry."""
    rows = np.zeros((N_KEYS + 1, N_KEYS + N_STATES))
    for s in range(N_STATES):
        for w in range(N_SYMBOLS):
            key = N_SYMBOLS * s + w
            rows[key, key] = 1.0
            rows[key, N_KEYS + automaton.next_state[s, w]] = 1.0
    rows[N_KEYS, N_SYMBOLS * state + symbol] = 1.0
    return rows


def test_300_automata_cover_all_others_though_no_model_is_identified():
    X, y = tables(300, seed=0)
    certificate = certify_identifiable(X)
    assert certificate.verdict == "not identifiable"
    assert certificate.proven
    assert (certificate.rank, certificate.n_features) == (RANK, 936)
    new, expected = tables(1000, seed=1)
    assert certificate.covers(new).all()
    assert np.abs(MHLARegressor().fit(X, y).predict(new) - expected).max() < 1e-10


def test_rank_is_that_of_exact_arithmetic():
    pytest.importorskip("flint")
    assert certify_identifiable(tables(300, seed=0)[0], method="exact").rank == RANK


def test_a_model_of_another_kind_agrees_where_covered_only():
    """Two minimisers of the risk: minimum norm, and that plus a null function."""
    X, _ = tables(150, seed=0)
    certificate = certify_identifiable(X)
    new, _ = tables(300, seed=1)
    # All tables of the training inputs are covered with the key that they ask for, in any order.
    shuffled = np.concatenate([X[:, -2::-1], X[:, -1:]], axis=1)
    assert certificate.covers(shuffled).all()
    null = certificate.null_space()
    rows, columns = np.triu_indices(N_KEYS + N_STATES)

    def published(inputs):
        Z = inputs.astype(float)
        states = np.einsum("ntj,ntk->njk", Z, Z)[:, rows, columns]
        return np.einsum("np,nl->npl", states, Z[:, -1]).reshape(len(Z), -1)

    moved = np.abs(published(new) @ null.T).max(1)
    np.testing.assert_array_equal(moved < 1e-6, certificate.covers(new))
    assert np.abs(published(shuffled) @ null.T).max() < 1e-10


def test_100_automata_cover_hardly_any():
    X, y = tables(100, seed=0)
    new, expected = tables(1000, seed=1)
    certificate = certify_identifiable(X)
    assert certificate.rank <= 100
    assert certificate.covers(new).mean() < 0.01
    right = MHLARegressor().fit(X, y).predict(new).argmax(1) == expected.argmax(1)
    assert 0.6 < right.mean() < 0.85


def test_suggested_automata_cover_all_with_as_few_as_the_rank():
    X, y = tables(100, seed=0)
    pool, answers = tables(1500, seed=2)
    certificate = certify_identifiable(X)
    chosen = certificate.suggest(pool, 500)
    assert len(chosen) == RANK - certificate.rank  # enough, so no more
    model = MHLARegressor().fit(np.concatenate([X, pool[chosen]]), [*y, *answers[chosen]])
    new, expected = tables(1000, seed=1)
    assert np.abs(model.predict(new) - expected).max() < 1e-10


def test_covered_automata_are_executed_without_error():
    random = np.random.default_rng(3)
    X, y = tables(300, seed=0)
    certificate, model = certify_identifiable(X), MHLARegressor().fit(X, y)
    for _ in range(20):
        automaton = FiniteAutomaton(random.integers(N_STATES, size=(N_STATES, N_SYMBOLS)))
        word = random.integers(N_SYMBOLS, size=12)
        states = [0]
        for symbol in word:
            query = tokens(automaton, states[-1], symbol)[None]
            assert certificate.covers(query).all()
            states.append(int(model.predict(query).argmax()))
        assert states == automaton.run(word)
