"""Mini-batches of states, queries and targets in standard units, for stochastic gradients.

A sequence enters the model through its state and its queries, so these are computed before the
first pass (or, where they do not fit into memory, piece by piece in every pass) and a pass costs
the same for any number of tokens behind a state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sklearn_mhla._backend import Array
from sklearn_mhla._design import Block
from sklearn_mhla._features import n_pairs, pair_indices
from sklearn_mhla._heads import Heads
from sklearn_mhla.solvers._base import LeastSquaresProblem

_MEMORY_SHARE = 0.5  # of what is free, for states that are kept


@dataclass(frozen=True)
class StandardUnits:
    """What tokens and targets are divided by.

    Each coordinate of the tokens has one divisor where it enters a state and one where it enters
    a query. They are folded into the heads, so the model class is that of the raw tokens.

    Attributes
    ----------
    state : ndarray of shape (d,)
        ``s``: ``S[j, k]`` is divided by ``s[j] s[k]``.
    query : ndarray of shape (d,)
    target : float
    offset : ndarray of shape (m,)
        Subtracted from targets before they are divided.
    """

    state: np.ndarray
    query: np.ndarray
    target: float
    offset: np.ndarray

    @classmethod
    def of(cls, problem: LeastSquaresProblem) -> StandardUnits:
        """Root mean squares over the rows of a problem; 1 for what is always zero."""
        design, backend = problem.design, problem.backend
        rows, columns = pair_indices(design.token_dim)
        diagonal = backend.index(np.flatnonzero(rows == columns))
        states = queries = np.zeros(design.token_dim)
        n_states = 0
        for block in design.blocks():
            squares = (backend.take(block.state, diagonal) ** 2).sum(0)
            states = states + backend.to_numpy(squares)
            queries = queries + backend.to_numpy((block.query**2).sum((0, 1)))
            n_states += len(block.state)
        return cls(
            _or_one((states / n_states) ** 0.25),
            _or_one((queries / design.n_rows) ** 0.5),
            float(_or_one(np.array(problem.mean(problem.targets**2).mean().item() ** 0.5))),
            np.array(backend.to_numpy(problem.target_mean)),
        )

    def rescaled(self, exponent: int, target_exponent: int) -> StandardUnits:
        """The same for tokens and targets that were multiplied by these powers of two."""
        return StandardUnits(
            np.ldexp(self.state, exponent),
            np.ldexp(self.query, exponent),
            math.ldexp(self.target, target_exponent),
            np.ldexp(self.offset, target_exponent),
        )

    def inwards(self, heads: Heads, intercept: np.ndarray) -> tuple[Heads, np.ndarray]:
        """A model in the units of the tokens to the same model in standard units."""
        value = heads.value * self.state / self.target
        key_query = heads.key_query * self.state[:, None] * self.query
        return Heads(value, key_query), (intercept - self.offset) / self.target

    def outwards(self, heads: Heads, intercept: np.ndarray) -> tuple[Heads, np.ndarray]:
        """The inverse of :meth:`inwards`."""
        value = heads.value / self.state * self.target
        key_query = heads.key_query / self.state[:, None] / self.query
        return Heads(value, key_query), intercept * self.target + self.offset

    def squared(self) -> np.ndarray:
        """Divisor of ``coef ** 2`` for each coefficient, shape (pairs, d)."""
        rows, columns = pair_indices(len(self.state))
        divisor: np.ndarray = (self.state[rows] * self.state[columns])[:, None] * self.query
        return divisor**2


@dataclass(frozen=True)
class Batch:
    """States that are read by the same number of queries.

    Attributes
    ----------
    state : array of shape (K, d (d + 1) / 2)
    query : array of shape (K, R, d)
    target : array of shape (K, R, m)
    weight : array of shape (K, R, 1)
        Zero where a query is absent (padding).
    """

    state: Array
    query: Array
    target: Array
    weight: Array

    def take(self, indices: Array) -> Batch:
        """The chosen states."""
        parts = (self.state, self.query, self.target, self.weight)
        return Batch(*(part.index_select(0, indices) for part in parts))


class Samples:
    """Some sequences of a problem as mini-batches.

    Parameters
    ----------
    problem : LeastSquaresProblem
        On a torch backend.
    units : StandardUnits
    chosen : ndarray
        Indices of the sequences, ascending.

    Attributes
    ----------
    total_weight : float
        Sum of the weights of all rows.
    mean_square : float
        Weighted mean of ``||target||^2``: twice the loss of the model that is constant.
    rows_per_sequence : float
        Mean number of rows of a sequence.
    """

    def __init__(
        self, problem: LeastSquaresProblem, units: StandardUnits, chosen: np.ndarray
    ) -> None:
        self.problem = problem
        self.units = units
        self.chosen = chosen
        design, backend = problem.design, problem.backend
        self._per_token = design.output == "sequence"
        self._prefix = self._per_token and design.causal
        lengths = design.sequences.lengths[chosen]
        self.rows_per_sequence = float(lengths.mean()) if self._per_token else 1.0
        rows, columns = pair_indices(design.token_dim)
        self._state_factor = backend.asarray(1.0 / (units.state[rows] * units.state[columns]))
        self._query_factor = backend.asarray(1.0 / units.query)
        self._offset = problem.target_mean - backend.asarray(units.offset)
        self._piece_size = self._sequences_that_fit(backend.available_memory())
        self._kept = self._load(chosen) if self._piece_size == len(chosen) else None
        targets, weights = self._targets(chosen)
        self.total_weight = float(weights.sum())
        self.mean_square = float((weights * targets**2).sum()) / self.total_weight

    def __len__(self) -> int:
        return len(self.chosen)

    def n_batches(self, batch_size: int) -> int:
        """Mini-batches of one pass."""
        n_pieces, rest = divmod(len(self), self._piece_size)
        return n_pieces * -(-self._piece_size // batch_size) + -(-rest // batch_size)

    def batches(
        self, batch_size: int, random: np.random.Generator | None = None
    ) -> Iterator[tuple[Batch, int]]:
        """Mini-batches with their numbers of sequences; in random order if ``random`` is given."""
        order = np.arange(len(self)) if random is None else random.permutation(len(self))
        for start in range(0, len(self), self._piece_size):
            if self._kept is not None:
                (piece, counts), members = self._kept, order
            else:
                members = order[start : start + self._piece_size]
                piece, counts = self._load(self.chosen[members])
                members = np.arange(len(members))
            states = _ranges(np.cumsum(counts) - counts, counts, members)
            at = self.problem.backend.index(states)
            ends = np.concatenate([[0], np.cumsum(counts[members])])
            for low in range(0, len(members), batch_size):
                high = min(low + batch_size, len(members))
                yield piece.take(at[int(ends[low]) : int(ends[high])]), high - low

    def _sequences_that_fit(self, available: int) -> int:
        design, n_outputs = self.problem.design, self.problem.targets.shape[1]
        rows = self.rows_per_sequence
        numbers = rows * (design.token_dim + n_outputs + 1)
        numbers += (rows if self._prefix else 1.0) * n_pairs(design.token_dim)
        fitting = int(_MEMORY_SHARE * available / (8.0 * numbers))
        return max(1, min(len(self.chosen), fitting))

    def _targets(self, chosen: np.ndarray) -> tuple[Array, Array]:
        """Targets (rows, m) and weights (rows, 1) of some sequences."""
        problem, backend = self.problem, self.problem.backend
        rows = chosen
        if self._per_token:
            lengths = problem.design.sequences.lengths
            rows = _ranges(np.cumsum(lengths) - lengths, lengths, chosen)
        at = backend.index(rows)
        targets = (problem.targets[at] + self._offset) / self.units.target
        if problem.weights is None:
            return targets, backend.zeros((len(rows), 1)) + 1.0
        return targets, problem.weights[at]

    def _load(self, chosen: np.ndarray) -> tuple[Batch, np.ndarray]:
        """All states of some sequences, in that order, and how many each sequence has."""
        backend, design = self.problem.backend, self.problem.design.take(chosen)
        targets, weights = self._targets(chosen)
        n_samples, lengths = len(chosen), design.sequences.lengths
        counts = lengths if self._prefix else np.ones(n_samples, dtype=np.intp)
        owner = np.repeat(np.arange(n_samples), lengths) if self._per_token else None
        shape = (int(counts.sum()), design.queries_per_state)
        state = backend.empty((shape[0], n_pairs(design.token_dim)))
        query = backend.zeros((*shape, design.token_dim))
        target = backend.zeros((*shape, targets.shape[1]))
        weight = backend.zeros((*shape, 1))
        for block in design.blocks():
            at = block.rows if owner is None or self._prefix else _owners(block, owner)
            used = slice(shape[1] - block.query.shape[1], shape[1])
            state[at] = block.state * self._state_factor
            query[at, used] = block.query * self._query_factor
            target[at, used] = block.gather(targets)
            weight[at, used] = block.gather(weights)
        return Batch(state, query, target, weight), counts


def _owners(block: Block, owner: np.ndarray) -> np.ndarray:
    """Sequences of a block whose rows are the tokens of one sequence after the other."""
    sequences = owner[block.rows]
    first: np.ndarray = sequences[np.append(True, np.diff(sequences) != 0)]
    return first


def _ranges(first: np.ndarray, counts: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """``first[i], ..., first[i] + counts[i] - 1`` for each chosen ``i``, joined."""
    counts = counts[chosen]
    shift = first[chosen] - (np.cumsum(counts) - counts)
    return np.repeat(shift, counts) + np.arange(int(counts.sum()))


def _or_one(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0.0, values, 1.0)
