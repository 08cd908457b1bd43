"""Finite automata, their encoding as tokens, and rows that teach their execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_scalar

from sklearn_mhla.datasets._layout import TokenLayout


@dataclass(frozen=True)
class FiniteAutomaton:
    """A deterministic finite automaton.

    Parameters
    ----------
    next_state : ndarray of int of shape (n_states, n_symbols)
        The state after reading a symbol in a state.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla.datasets import FiniteAutomaton
    >>> parity = FiniteAutomaton(np.array([[0, 1], [1, 0]]))
    >>> parity.run([1, 0, 1, 1])
    [0, 1, 1, 0, 1]
    """

    next_state: np.ndarray

    @property
    def n_states(self) -> int:
        """Number of states."""
        return len(self.next_state)

    @property
    def n_symbols(self) -> int:
        """Size of the alphabet."""
        return int(self.next_state.shape[1])

    def run(self, word: Sequence[int], state: int = 0) -> list[int]:
        """States before, between and after the letters of a word.

        Parameters
        ----------
        word : sequence of int
            Symbols.
        state : int, default=0
            Where to start.

        Returns
        -------
        list of int
            ``len(word) + 1`` states.
        """
        states = [state]
        for symbol in word:
            states.append(int(self.next_state[states[-1], symbol]))
        return states


class AutomatonEncoding:
    """Tokens with which one layer of linear attention executes any automaton of a size.

    The context holds one token per transition (a one-hot key for state and symbol, and the next
    state) and one per letter (position and symbol). The computation history alternates between

    * "at": position and state, as one joint one-hot block. Its successor looks the letter up:
      ``S[symbol, position]`` times the query;
    * "reading": position, state and symbol. Its successor looks the transition up:
      ``S[next_state, key]`` times the query.

    Each successor is linear in products of one entry of the state matrix with one of the query,
    so linear attention expresses it exactly (the expressivity of Yau et al., "Learning Linear
    Attention in Polynomial Time", arXiv 2410.10101, section 3, for automata).

    Parameters
    ----------
    n_states : int
        Number of states.
    n_symbols : int
        Size of the alphabet.
    word_length : int
        Letters per word.

    Attributes
    ----------
    layout : TokenLayout
        The blocks ``position``, ``symbol``, ``key``, ``next_state``, ``at``, ``reading``.
    token_dim : int
        Width of a token.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla.datasets import AutomatonEncoding, FiniteAutomaton
    >>> encoding = AutomatonEncoding(n_states=2, n_symbols=2, word_length=3)
    >>> parity = FiniteAutomaton(np.array([[0, 1], [1, 0]]))
    >>> history = encoding.history(parity, [1, 0, 1])
    >>> encoding.states(history)
    [0, 1, 1, 0]
    """

    def __init__(self, n_states: int, n_symbols: int, word_length: int) -> None:
        self.n_states = n_states
        self.n_symbols = n_symbols
        self.word_length = word_length
        self.layout = TokenLayout(
            position=word_length,
            symbol=n_symbols,
            key=n_states * n_symbols,
            next_state=n_states,
            at=(word_length + 1) * n_states,
            reading=word_length * n_states * n_symbols,
        )
        self.token_dim = self.layout.token_dim

    def prompt(self, automaton: FiniteAutomaton, word: Sequence[int], state: int = 0) -> np.ndarray:
        """The context and the first query.

        Parameters
        ----------
        automaton : FiniteAutomaton
            Of this size.
        word : sequence of int
            ``word_length`` symbols.
        state : int, default=0
            Where to start.

        Returns
        -------
        ndarray of shape (n_states * n_symbols + word_length + 1, token_dim)
            Tokens; the last is the query.
        """
        if (automaton.n_states, automaton.n_symbols, len(word)) != (
            self.n_states,
            self.n_symbols,
            self.word_length,
        ):
            raise ValueError(
                f"This encoding is for {self.n_states} states, {self.n_symbols} symbols and words "
                f"of {self.word_length} letters; got {automaton.n_states}, {automaton.n_symbols} "
                f"and a word of {len(word)}."
            )
        token = self.layout.token
        program = [
            token(key=s * self.n_symbols + w, next_state=int(automaton.next_state[s, w]))
            for s in range(self.n_states)
            for w in range(self.n_symbols)
        ]
        letters = [token(position=t, symbol=int(w)) for t, w in enumerate(word)]
        return np.array([*program, *letters, token(at=state)])

    def history(
        self, automaton: FiniteAutomaton, word: Sequence[int], state: int = 0
    ) -> np.ndarray:
        """The prompt and the whole computation, by simulation.

        Parameters
        ----------
        automaton : FiniteAutomaton
            Of this size.
        word : sequence of int
            ``word_length`` symbols.
        state : int, default=0
            Where to start.

        Returns
        -------
        ndarray of shape (n_states * n_symbols + 3 * word_length + 1, token_dim)
            Tokens; two per letter after the prompt.
        """
        tokens = list(self.prompt(automaton, word, state))
        states = automaton.run(word, state)
        for t, symbol in enumerate(word):
            joint = t * self.n_states + states[t]
            tokens.append(self.layout.token(reading=joint * self.n_symbols + int(symbol)))
            tokens.append(self.layout.token(at=(t + 1) * self.n_states + states[t + 1]))
        return np.array(tokens)

    def states(self, tokens: np.ndarray) -> list[int]:
        """The states that a computation history goes through.

        Parameters
        ----------
        tokens : ndarray of shape (n_tokens, token_dim)
            A history, simulated or generated.

        Returns
        -------
        list of int
            One per "at" token, in order.
        """
        places = [self.layout.read(token).get("at") for token in tokens]
        return [place % self.n_states for place in places if place is not None]


class AutomatonRun(NamedTuple):
    """One automaton and the word that it was run on.

    Parameters
    ----------
    automaton : FiniteAutomaton
        The automaton.
    word : ndarray of int
        The word.

    Examples
    --------
    >>> from sklearn_mhla.datasets import make_dfa_execution
    >>> _, _, runs = make_dfa_execution(2, return_runs=True, random_state=0)
    >>> len(runs), runs[0].word.shape
    (2, (3,))
    """

    automaton: FiniteAutomaton
    word: np.ndarray


def make_dfa_execution(
    n_samples: int = 100,
    n_states: int = 3,
    n_symbols: int = 2,
    word_length: int = 3,
    *,
    return_runs: bool = False,
    random_state: Any = None,
) -> Any:
    """Rows "history so far" -> "next token" of random automata on random words.

    Every transition table and every word is equally likely; runs start in state 0. See
    :class:`AutomatonEncoding` for the tokens.

    Parameters
    ----------
    n_samples : int, default=100
        Number of runs; each gives ``2 word_length`` consecutive rows.
    n_states : int, default=3
        States of the automata.
    n_symbols : int, default=2
        Size of the alphabet.
    word_length : int, default=3
        Letters per word.
    return_runs : bool, default=False
        Whether to return the automata and words as well.
    random_state : int, RandomState instance or None, default=None
        Seed; the same seed gives the same data.

    Returns
    -------
    X : list of ndarray of shape (n_tokens_i, token_dim)
        Histories, views of one array per run.
    y : ndarray of shape (2 * word_length * n_samples, token_dim)
        The token that follows.
    runs : list of AutomatonRun
        Only returned if ``return_runs`` is True.

    See Also
    --------
    AutomatonEncoding : Encodes an automaton of your own.

    Examples
    --------
    >>> from sklearn_mhla.datasets import make_dfa_execution
    >>> X, y = make_dfa_execution(10, random_state=0)
    >>> len(X), y.shape
    (60, (60, 44))
    """
    for name, value in [
        ("n_samples", n_samples),
        ("n_states", n_states),
        ("n_symbols", n_symbols),
        ("word_length", word_length),
    ]:
        check_scalar(value, name, Integral, min_val=1)
    random = check_random_state(random_state)
    encoding = AutomatonEncoding(n_states, n_symbols, word_length)
    tables = random.randint(n_states, size=(n_samples, n_states, n_symbols))
    words = random.randint(n_symbols, size=(n_samples, word_length))
    runs = [
        AutomatonRun(FiniteAutomaton(table), word)
        for table, word in zip(tables, words, strict=True)
    ]
    X, y = next_token_rows(
        [encoding.history(run.automaton, run.word.tolist()) for run in runs], 2 * word_length
    )
    return (X, y, runs) if return_runs else (X, y)


def next_token_rows(
    histories: list[np.ndarray], n_generated: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Every prefix that ends before one of the last ``n_generated`` tokens, and that token."""
    X, y = [], []
    for tokens in histories:
        for end in range(len(tokens) - n_generated, len(tokens)):
            X.append(tokens[:end])
            y.append(tokens[end])
    return X, np.array(y)
