"""Automata: the simulator against a dictionary, the encoding against explicit coefficients."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import MHLARegressor
from sklearn_mhla.datasets import AutomatonEncoding, FiniteAutomaton, make_dfa_execution


def exact_coefficients(encoding):
    """``W[a, j, k, l]`` that executes every automaton: the two look-ups, entry by entry."""
    d, at = encoding.token_dim, encoding.layout
    W = np.zeros((d, d, d, d))
    Q, V, L = encoding.n_states, encoding.n_symbols, encoding.word_length
    for t in range(L):
        for s in range(Q):
            for w in range(V):
                reading = at["reading"].start + (t * Q + s) * V + w
                place = at["at"].start + t * Q + s
                W[reading, at["symbol"].start + w, at["position"].start + t, place] = 1.0
                for following in range(Q):
                    target = at["at"].start + (t + 1) * Q + following
                    key = at["key"].start + s * V + w
                    W[target, at["next_state"].start + following, key, reading] = 1.0
    return W


def test_linear_attention_executes_every_automaton():
    encoding = AutomatonEncoding(2, 2, 2)
    W = exact_coefficients(encoding)
    X, y, runs = make_dfa_execution(12, 2, 2, 2, return_runs=True, random_state=0)
    for history, following in zip(X, y, strict=True):
        state = reference.state_matrix(history)
        np.testing.assert_array_equal(np.einsum("ajkl,jk,l->a", W, state, history[-1]), following)
    # The history ends by itself: at the end of the word there is no letter to look up.
    whole = encoding.history(runs[0].automaton, runs[0].word)
    end = np.einsum("ajkl,jk,l->a", W, reference.state_matrix(whole), whole[-1])
    assert not end.any()


def test_rows_follow_the_simulation():
    X, y, runs = make_dfa_execution(5, 3, 2, 4, return_runs=True, random_state=1)
    encoding = AutomatonEncoding(3, 2, 4)
    assert len(X) == len(y) == 5 * 8
    for i, (automaton, word) in enumerate(runs):
        table = {(s, w): int(automaton.next_state[s, w]) for s in range(3) for w in range(2)}
        states = [0]
        for letter in word:
            states.append(table[states[-1], letter])
        whole = np.vstack([X[8 * i + 7], y[8 * i + 7]])
        assert encoding.states(whole) == states == automaton.run(word)
        for k in range(8):
            np.testing.assert_array_equal(X[8 * i + k], whole[: len(whole) - 8 + k])
            np.testing.assert_array_equal(y[8 * i + k], whole[len(whole) - 8 + k])


def test_learned_from_random_automata():
    X, y = make_dfa_execution(250, 2, 2, 2, random_state=0)
    model = MHLARegressor().fit(X, y)
    fresh, truth = make_dfa_execution(50, 2, 2, 2, random_state=1)
    np.testing.assert_allclose(model.predict(fresh), truth, atol=1e-9)


def test_seeds_and_errors():
    X, y = make_dfa_execution(3, random_state=4)
    again, _ = make_dfa_execution(3, random_state=4)
    assert all((a == b).all() for a, b in zip(X, again, strict=True))
    assert X[0].shape[1] == y.shape[1]
    with pytest.raises(ValueError, match="word_length"):
        make_dfa_execution(word_length=0)
    parity = FiniteAutomaton(np.array([[0, 1], [1, 0]]))
    with pytest.raises(ValueError, match="words of 3 letters; got 2, 2 and a word of 2"):
        AutomatonEncoding(2, 2, 3).prompt(parity, [0, 1])
