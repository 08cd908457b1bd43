"""Turing machines, their encoding as tokens, and rows that teach their execution."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_scalar

from sklearn_mhla.datasets._automata import next_token_rows
from sklearn_mhla.datasets._layout import TokenLayout

_MOVES = {"L": -1, "N": 0, "R": 1, -1: -1, 0: 0, 1: 1}


class Configuration(NamedTuple):
    """What a Turing machine is at one moment.

    Parameters
    ----------
    tape : tuple of int
        Symbol of every cell.
    head : int
        Cell of the head.
    state : int
        State of the control.

    Examples
    --------
    >>> from sklearn_mhla.datasets import Configuration
    >>> Configuration(tape=(0, 1, 1), head=2, state=0).tape
    (0, 1, 1)
    """

    tape: tuple[int, ...]
    head: int
    state: int


@dataclass(frozen=True)
class TuringMachine:
    """A deterministic Turing machine on a tape with two ends.

    A step reads the symbol under the head, writes a symbol, moves the head by one cell at most
    and changes the state. A move beyond an end of the tape leaves the head where it is. There is
    no halting: a machine that is done stays in a state that changes nothing.

    Parameters
    ----------
    next_state, write, move : ndarray of int of shape (n_states, n_symbols)
        What to do in a state at a symbol; moves are -1, 0 or 1.

    Examples
    --------
    >>> from sklearn_mhla.datasets import TuringMachine
    >>> flip = TuringMachine.from_table({
    ...     ("go", 0): ("go", 1, "R"),
    ...     ("go", 1): ("go", 0, "R"),
    ... })
    >>> flip.run([0, 1, 0], n_steps=2)[-1]
    Configuration(tape=(1, 0, 0), head=2, state=0)
    """

    next_state: np.ndarray
    write: np.ndarray
    move: np.ndarray

    @classmethod
    def from_table(
        cls, table: Mapping[tuple[Hashable, int], tuple[Hashable, int, str | int]]
    ) -> TuringMachine:
        """A machine from its rules.

        Parameters
        ----------
        table : mapping of (state, symbol) to (next state, written symbol, move)
            Symbols are 0, 1, ...; states have any names, the first one named is the start;
            moves are "L", "N", "R" or -1, 0, 1. What is not listed changes nothing.

        Returns
        -------
        TuringMachine
            With as many states and symbols as the table mentions.

        Raises
        ------
        ValueError
            If a symbol or a move is none.
        """
        states: dict[Hashable, int] = {}
        for (state, _), (following, _, _) in table.items():
            states.setdefault(state, len(states))
            states.setdefault(following, len(states))
        symbols = [s for (_, read), (_, written, _) in table.items() for s in (read, written)]
        if not table or min(symbols) < 0 or any(s != int(s) for s in symbols):
            raise ValueError(f"Symbols must be 0, 1, ...; the table has {sorted(set(symbols))}.")
        machine = cls._idle(len(states), max(symbols) + 1)
        for (state, read), (following, written, move) in table.items():
            if move not in _MOVES:
                raise ValueError(
                    f"A move must be 'L', 'N' or 'R'; got {move!r} in state {state!r}."
                )
            at = states[state], read
            machine.next_state[at] = states[following]
            machine.write[at], machine.move[at] = written, _MOVES[move]
        return machine

    @classmethod
    def _idle(cls, n_states: int, n_symbols: int) -> TuringMachine:
        """The machine that changes nothing."""
        state, symbol = np.indices((n_states, n_symbols))
        return cls(state, symbol, np.zeros((n_states, n_symbols), dtype=int))

    @property
    def n_states(self) -> int:
        """Number of states."""
        return len(self.next_state)

    @property
    def n_symbols(self) -> int:
        """Size of the tape alphabet."""
        return int(self.next_state.shape[1])

    def extended(self, n_states: int, n_symbols: int) -> TuringMachine:
        """The same machine with further states and symbols, at which it changes nothing.

        Parameters
        ----------
        n_states, n_symbols : int
            Not fewer than the machine has.

        Returns
        -------
        TuringMachine
            With tables of its own.
        """
        machine = self._idle(n_states, n_symbols)
        own = slice(self.n_states), slice(self.n_symbols)
        machine.next_state[own], machine.write[own] = self.next_state, self.write
        machine.move[own] = self.move
        return machine

    def run(
        self, tape: Sequence[int], n_steps: int, head: int = 0, state: int = 0
    ) -> list[Configuration]:
        """Simulate.

        Parameters
        ----------
        tape : sequence of int
            Symbol of every cell.
        n_steps : int
            Steps to take.
        head, state : int, default=0
            Where to start.

        Returns
        -------
        list of Configuration
            ``n_steps + 1`` of them, the first is the start.
        """
        cells = [int(symbol) for symbol in tape]
        history = [Configuration(tuple(cells), head, state)]
        for _ in range(n_steps):
            at = state, cells[head]
            cells[head] = int(self.write[at])
            head = min(max(head + int(self.move[at]), 0), len(cells) - 1)
            state = int(self.next_state[at])
            history.append(Configuration(tuple(cells), head, state))
        return history


class TuringMachineEncoding:
    """Tokens with which one layer of linear attention executes any Turing machine of a size.

    The context holds one token per rule (a one-hot key for state and symbol; next state and move;
    written symbol) and one per cell of the tape (position and symbol). Two tokens per step follow:

    * "at": head and state as one joint one-hot block. Its successor reads the tape:
      ``S[symbol, position]`` times the query;
    * "reading": head, state and symbol. Its successor looks the rule up and writes: it holds the
      position, the *difference* of the new and the old symbol, and the new head and state.

    Since differences are written, the sum over the history, ``S[symbol, position]``, is the
    current content of every cell. All coordinates are integers, so rounding each output gives an
    exact rollout. That linear attention can execute a universal machine is shown by Yau et al.,
    "Learning Linear Attention in Polynomial Time", arXiv 2410.10101, section 3, with another
    encoding.

    Parameters
    ----------
    n_cells : int
        Cells of the tape.
    n_states : int
        States of the machines.
    n_symbols : int
        Size of the tape alphabet.

    Attributes
    ----------
    layout : TokenLayout
        The blocks ``position``, ``symbol``, ``key``, ``action``, ``written``, ``at``, ``reading``.
    token_dim : int
        Width of a token.

    Examples
    --------
    >>> from sklearn_mhla.datasets import TuringMachine, TuringMachineEncoding
    >>> flip = TuringMachine.from_table({(0, 0): (0, 1, "R"), (0, 1): (0, 0, "R")})
    >>> encoding = TuringMachineEncoding(n_cells=3, n_states=1, n_symbols=2)
    >>> encoding.tapes(encoding.history(flip, [0, 1, 0], n_steps=2))
    array([[0, 1, 0],
           [1, 1, 0],
           [1, 0, 0]])
    """

    def __init__(self, n_cells: int, n_states: int, n_symbols: int) -> None:
        self.n_cells = n_cells
        self.n_states = n_states
        self.n_symbols = n_symbols
        self.layout = TokenLayout(
            position=n_cells,
            symbol=n_symbols,
            key=n_states * n_symbols,
            action=3 * n_states,
            written=n_symbols,
            at=n_cells * n_states,
            reading=n_cells * n_states * n_symbols,
        )
        self.token_dim = self.layout.token_dim

    def prompt(
        self, machine: TuringMachine, tape: Sequence[int], head: int = 0, state: int = 0
    ) -> np.ndarray:
        """The context and the first query.

        Parameters
        ----------
        machine : TuringMachine
            Of this size or smaller; rules for the remaining states and symbols change nothing.
        tape : sequence of int
            ``n_cells`` symbols.
        head, state : int, default=0
            Where to start.

        Returns
        -------
        ndarray of shape (n_states * n_symbols + n_cells + 1, token_dim)
            Tokens; the last is the query.

        Raises
        ------
        ValueError
            If the machine or the tape does not fit.
        """
        if machine.n_states > self.n_states or machine.n_symbols > self.n_symbols:
            raise ValueError(
                f"This encoding is for machines of up to {self.n_states} states and "
                f"{self.n_symbols} symbols; got {machine.n_states} and {machine.n_symbols}."
            )
        if len(tape) != self.n_cells or not set(tape) <= set(range(self.n_symbols)):
            raise ValueError(
                f"tape must hold {self.n_cells} symbols out of 0..{self.n_symbols - 1}; got "
                f"{list(tape)}."
            )
        token = self.layout.token
        machine = machine.extended(self.n_states, self.n_symbols)
        program = [
            token(
                key=q * self.n_symbols + s,
                action=3 * int(machine.next_state[q, s]) + int(machine.move[q, s]) + 1,
                written=int(machine.write[q, s]),
            )
            for q in range(self.n_states)
            for s in range(self.n_symbols)
        ]
        cells = [token(position=p, symbol=int(s)) for p, s in enumerate(tape)]
        return np.array([*program, *cells, token(at=head * self.n_states + state)])

    def history(
        self,
        machine: TuringMachine,
        tape: Sequence[int],
        n_steps: int,
        head: int = 0,
        state: int = 0,
    ) -> np.ndarray:
        """The prompt and the whole computation, by simulation.

        Parameters
        ----------
        machine : TuringMachine
            Of this size or smaller.
        tape : sequence of int
            ``n_cells`` symbols.
        n_steps : int
            Steps to take.
        head, state : int, default=0
            Where to start.

        Returns
        -------
        ndarray of shape (n_states * n_symbols + n_cells + 1 + 2 * n_steps, token_dim)
            Tokens; two per step after the prompt.
        """
        tokens = list(self.prompt(machine, tape, head, state))
        machine = machine.extended(self.n_states, self.n_symbols)
        run = machine.run(tape, n_steps, head, state)
        for before, after in pairwise(run):
            place, old = before.head, before.tape[before.head]
            joint = place * self.n_states + before.state
            tokens.append(self.layout.token(reading=joint * self.n_symbols + old))
            act = self.layout.token(position=place, at=after.head * self.n_states + after.state)
            act[self.layout["symbol"]][after.tape[place]] += 1.0
            act[self.layout["symbol"]][old] -= 1.0
            tokens.append(act)
        return np.array(tokens)

    def tapes(self, tokens: np.ndarray) -> np.ndarray:
        """The tape at the start and after every step of a history.

        Parameters
        ----------
        tokens : ndarray of shape (n_tokens, token_dim)
            A history, simulated or generated.

        Returns
        -------
        ndarray of int of shape (n_steps + 1, n_cells)
            Symbols; one row per "at" token.
        """
        rounded = np.rint(np.asarray(tokens))
        writes = rounded[:, self.layout["position"], None] * rounded[:, None, self.layout["symbol"]]
        is_at = rounded[:, self.layout["at"]].any(axis=1)
        tapes: np.ndarray = writes.cumsum(axis=0)[is_at].argmax(axis=2)
        return tapes

    def configurations(self, tokens: np.ndarray) -> list[Configuration]:
        """Tape, head and state at the start and after every step of a history.

        Parameters
        ----------
        tokens : ndarray of shape (n_tokens, token_dim)
            A history, simulated or generated.

        Returns
        -------
        list of Configuration
            One per "at" token, as `TuringMachine.run` returns them.
        """
        places = [self.layout.read(token).get("at") for token in tokens]
        ats = [divmod(place, self.n_states) for place in places if place is not None]
        tapes = self.tapes(tokens).tolist()
        return [
            Configuration(tuple(tape), head, state)
            for tape, (head, state) in zip(tapes, ats, strict=True)
        ]


class TuringRun(NamedTuple):
    """One machine and where it was started.

    Parameters
    ----------
    machine : TuringMachine
        The machine.
    tape : ndarray of int
        Symbol of every cell.
    head : int
        Cell of the head.
    state : int
        State of the control.

    Examples
    --------
    >>> from sklearn_mhla.datasets import make_turing_machine
    >>> _, _, runs = make_turing_machine(2, return_runs=True, random_state=0)
    >>> len(runs), runs[0].tape.shape
    (2, (3,))
    """

    machine: TuringMachine
    tape: np.ndarray
    head: int
    state: int


def make_turing_machine(
    n_samples: int = 100,
    n_cells: int = 3,
    n_states: int = 2,
    n_symbols: int = 2,
    n_steps: int = 8,
    *,
    return_runs: bool = False,
    random_state: Any = None,
) -> Any:
    """Rows "history so far" -> "next token" of random Turing machines on random tapes.

    Rules, tape, head and state are drawn uniformly. See :class:`TuringMachineEncoding` for the
    tokens.

    Parameters
    ----------
    n_samples : int, default=100
        Number of runs; each gives ``2 n_steps`` consecutive rows.
    n_cells : int, default=3
        Cells of the tape.
    n_states : int, default=2
        States of the machines.
    n_symbols : int, default=2
        Size of the tape alphabet.
    n_steps : int, default=8
        Steps per run.
    return_runs : bool, default=False
        Whether to return the machines and their starts as well.
    random_state : int, RandomState instance or None, default=None
        Seed; the same seed gives the same data.

    Returns
    -------
    X : list of ndarray of shape (n_tokens_i, token_dim)
        Histories, views of one array per run.
    y : ndarray of shape (2 * n_steps * n_samples, token_dim)
        The token that follows.
    runs : list of TuringRun
        Only returned if ``return_runs`` is True.

    See Also
    --------
    TuringMachineEncoding : Encodes a machine of your own.

    Examples
    --------
    >>> from sklearn_mhla.datasets import make_turing_machine
    >>> X, y = make_turing_machine(10, n_steps=4, random_state=0)
    >>> len(X), y.shape
    (80, (80, 35))
    """
    for name, value in [
        ("n_samples", n_samples),
        ("n_cells", n_cells),
        ("n_states", n_states),
        ("n_symbols", n_symbols),
        ("n_steps", n_steps),
    ]:
        check_scalar(value, name, Integral, min_val=1)
    random = check_random_state(random_state)
    encoding = TuringMachineEncoding(n_cells, n_states, n_symbols)
    rules = (n_samples, n_states, n_symbols)
    runs = [
        TuringRun(TuringMachine(next_state, write, move), tape, int(head), int(state))
        for next_state, write, move, tape, head, state in zip(
            random.randint(n_states, size=rules),
            random.randint(n_symbols, size=rules),
            random.randint(-1, 2, size=rules),
            random.randint(n_symbols, size=(n_samples, n_cells)),
            random.randint(n_cells, size=n_samples),
            random.randint(n_states, size=n_samples),
            strict=True,
        )
    ]
    histories = [
        encoding.history(run.machine, run.tape.tolist(), n_steps, run.head, run.state)
        for run in runs
    ]
    X, y = next_token_rows(histories, 2 * n_steps)
    return (X, y, runs) if return_runs else (X, y)
