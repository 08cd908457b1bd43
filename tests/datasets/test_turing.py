"""Turing machines: the simulator against known results, the encoding against coefficients."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from sklearn_mhla.datasets import TuringMachine, TuringMachineEncoding, make_turing_machine


def exact_coefficients(encoding):
    """``W[a, j, k, l]`` that executes every machine, entry by entry."""
    d, at = encoding.token_dim, {name: block.start for name, block in encoding.layout.items()}
    P, Q, S = encoding.n_cells, encoding.n_states, encoding.n_symbols
    W = np.zeros((d, d, d, d))
    for p in range(P):
        for q in range(Q):
            place = at["at"] + p * Q + q
            for s in range(S):
                reading = at["reading"] + (p * Q + q) * S + s
                key = at["key"] + q * S + s
                # Read: the content of cell p.
                W[reading, at["symbol"] + s, at["position"] + p, place] += 1.0
                # Act: a rule's key meets itself once, so this is the constant one.
                W[at["position"] + p, key, key, reading] += 1.0
                W[at["symbol"] + s, key, key, reading] -= 1.0
                for w in range(S):
                    W[at["symbol"] + w, at["written"] + w, key, reading] += 1.0
                for following in range(Q):
                    for move in (-1, 0, 1):
                        target = at["at"] + min(max(p + move, 0), P - 1) * Q + following
                        W[target, at["action"] + 3 * following + move + 1, key, reading] += 1.0
    return W


@pytest.mark.parametrize("size", [(2, 2, 2), (3, 1, 2), (2, 1, 3)])
def test_linear_attention_executes_every_machine(size):
    W = exact_coefficients(TuringMachineEncoding(*size))
    X, y = make_turing_machine(10, *size, n_steps=5, random_state=0)
    for history, following in zip(X, y, strict=True):
        state = reference.state_matrix(history)
        np.testing.assert_array_equal(np.einsum("ajkl,jk,l->a", W, state, history[-1]), following)


def test_busy_beaver():
    """Two states and a halt: six steps, four ones (Rado, 1962)."""
    beaver = TuringMachine.from_table(
        {
            ("A", 0): ("B", 1, "R"),
            ("A", 1): ("B", 1, "L"),
            ("B", 0): ("A", 1, "L"),
            ("B", 1): ("halt", 1, "R"),
        }
    )
    run = beaver.run([0] * 7, n_steps=9, head=3)
    halted = [i for i, moment in enumerate(run) if moment.state == 2]
    assert halted[0] == 6
    assert sum(run[-1].tape) == 4
    assert run[6] == run[-1]


def test_binary_increment():
    """Walk right over the digits, then carry to the left."""
    increment = TuringMachine.from_table(
        {
            ("right", 0): ("right", 0, "R"),
            ("right", 1): ("right", 1, "R"),
            ("right", 2): ("carry", 2, "L"),
            ("carry", 1): ("carry", 0, "L"),
            ("carry", 0): ("done", 1, "N"),
        }
    )
    for value in range(31):
        digits = [int(digit) for digit in f"{value:05b}"]
        tape = increment.run([*digits, 2], n_steps=20)[-1].tape
        assert int("".join(map(str, tape[:5])), 2) == value + 1


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 100))
def test_histories_decode_to_the_simulation(n_cells, n_states, n_symbols, seed):
    X, y, runs = make_turing_machine(
        2, n_cells, n_states, n_symbols, 6, return_runs=True, random_state=seed
    )
    encoding = TuringMachineEncoding(n_cells, n_states, n_symbols)
    for i, (machine, tape, head, state) in enumerate(runs):
        cells, at, control = list(tape), head, state
        expected = [(tuple(cells), at, control)]
        for _ in range(6):
            rule = control, cells[at]
            cells[at] = machine.write[rule]
            at = min(max(at + machine.move[rule], 0), n_cells - 1)
            control = machine.next_state[rule]
            expected.append((tuple(cells), at, control))
        whole = np.vstack([X[12 * i + 11], y[12 * i + 11]])
        assert encoding.configurations(whole) == expected == machine.run(tape, 6, head, state)


def test_smaller_machines_fit_into_a_larger_encoding():
    flip = TuringMachine.from_table({(0, 0): (0, 1, "R"), (0, 1): (0, 0, "R")})
    encoding = TuringMachineEncoding(4, 3, 3)
    tapes = encoding.tapes(encoding.history(flip, [0, 1, 1, 0], 3))
    assert tapes[-1].tolist() == [1, 0, 0, 0]


def test_smaller_machines_change_nothing_beyond_their_table():
    flip = TuringMachine.from_table({("go", 0): ("go", 1, "R"), ("go", 1): ("go", 0, "R")})
    encoding = TuringMachineEncoding(3, 2, 3)
    run = encoding.configurations(encoding.history(flip, [0, 2, 1], n_steps=4))
    assert [c.tape for c in run] == [(0, 2, 1)] + 4 * [(1, 2, 1)]
    assert [c.head for c in run] == [0, 1, 1, 1, 1]
    waiting = encoding.configurations(encoding.history(flip, [0, 1, 0], 3, head=2, state=1))
    assert set(waiting) == {((0, 1, 0), 2, 1)}
    assert (flip.n_states, flip.n_symbols) == (1, 2)  # not extended in place


def test_errors():
    flip = TuringMachine.from_table({(0, 0): (0, 1, "R"), (0, 1): (0, 0, "R")})
    with pytest.raises(ValueError, match="up to 1 states and 1 symbols; got 1 and 2"):
        TuringMachineEncoding(3, 1, 1).prompt(flip, [0, 0, 0])
    with pytest.raises(ValueError, match="3 symbols out of"):
        TuringMachineEncoding(3, 1, 2).prompt(flip, [0, 0])
    with pytest.raises(ValueError, match=r"out of 0\.\.1"):
        TuringMachineEncoding(3, 1, 2).prompt(flip, [0, 0, 2])
    with pytest.raises(ValueError, match="A move must be"):
        TuringMachine.from_table({(0, 0): (0, 1, "up")})
    with pytest.raises(ValueError, match="Symbols must be"):
        TuringMachine.from_table({(0, -1): (0, 1, "R")})
    with pytest.raises(ValueError, match="n_steps"):
        make_turing_machine(n_steps=0)


def test_sizes():
    assert TuringMachineEncoding(3, 2, 2).token_dim == 35
    assert TuringMachineEncoding(4, 2, 2).token_dim == 42
