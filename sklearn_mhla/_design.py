"""The implicit design matrix: rows of cubic features that are never written down.

Row ``i`` of the ``(rows, p)`` matrix ``Phi`` is ``phi = svec(S) (x) q``. For
``output="last"`` there is one row per sequence; for ``output="sequence"`` one per token, from
the prefix state (``causal``) or from the state of the whole sequence. This module walks over
sequences in blocks that fit the cache and offers products with ``Phi`` and its transpose.

Tokens are divided by a power of two that brings the largest coordinate into [0.5, 1). This is
exact, and it makes every solver and every tolerance independent of the units of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from tqdm import tqdm

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._features import (
    adjoint_block,
    full_state,
    n_cubic_features,
    n_pairs,
    pair_indices,
    predict_block,
    prefix_states,
    used_pairs,
)
from sklearn_mhla._tokens import Sequences

# Rows per block: the packed states of a block should stay within the cache (2**17 doubles = 1
# MiB), while matrix products want at least 256 rows; token buffers are bounded separately.
_STATE_BUDGET = 2**17
_TOKEN_BUDGET = 2**23
_MIN_ROWS, _MAX_ROWS = 256, 8192
# Coordinates whose sizes differ by no more than this factor are left as they are.
_EQUAL_ENOUGH = 32.0


@dataclass(frozen=True)
class Equilibration:
    """Powers of two that bring the coordinates of tokens to about the same size.

    Which features are linear combinations of others does not depend on units, but rounding
    does.

    Attributes
    ----------
    state, query : ndarray of shape (d,)
        ``S[j, k]`` is multiplied by ``state[j] * state[k]``, ``q[l]`` by ``query[l]``.
    """

    state: np.ndarray
    query: np.ndarray

    @classmethod
    def of_sizes(cls, state: np.ndarray, query: np.ndarray) -> Equilibration | None:
        """For coordinates of given sizes (d,); None if these are about equal already."""
        powers = [_powers_to_largest(sizes) for sizes in (state, query)]
        if max(part.max() for part in powers) <= _EQUAL_ENOUGH:
            return None
        return cls(*powers)

    def pairs(self) -> np.ndarray:
        """Factors of packed states, shape (d (d + 1) / 2,)."""
        rows, columns = pair_indices(len(self.state))
        factors: np.ndarray = self.state[rows] * self.state[columns]
        return factors

    def features(self) -> np.ndarray:
        """Factors of features, shape (p,)."""
        factors: np.ndarray = np.outer(self.pairs(), self.query).reshape(-1)
        return factors


@dataclass(frozen=True)
class Block:
    """Some rows of the design matrix in factored form.

    Attributes
    ----------
    state : array of shape (K, d (d + 1) / 2)
        Packed states.
    query : array of shape (K, R, d)
        ``R`` queries read each state; absent ones (padding) are zero.
    rows : slice or ndarray
        Positions of the block's rows in the design matrix.
    present : array of shape (K, R) or None
        Marks the queries that are rows; None if all are.
    backend : Backend
    """

    state: Array
    query: Array
    rows: slice | np.ndarray
    present: np.ndarray | None
    backend: Backend

    def gather(self, values: Array) -> Array:
        """Row values ``(rows, m)`` as ``(K, R, m)``, zero where a query is absent."""
        n_states, n_queries = self.query.shape[:2]
        if self.present is None:
            return values[self.rows].reshape(n_states, n_queries, -1)
        placed = self.backend.zeros((n_states * n_queries, values.shape[1]))
        placed[np.flatnonzero(self.present)] = values[self.rows]
        return placed.reshape(n_states, n_queries, -1)

    def scatter(self, values: Array, out: Array) -> None:
        """Write ``(K, R, m)`` into the block's rows of ``out`` ``(rows, m)``."""
        flat = values.reshape(-1, values.shape[-1])
        out[self.rows] = flat if self.present is None else flat[np.flatnonzero(self.present)]


class Design:
    """Products with the design matrix ``Phi`` of a set of sequences.

    Parameters
    ----------
    sequences : Sequences
    backend : Backend
    output : {"last", "sequence"}
        One row per sequence, or one per token.
    causal : bool
        For ``output="sequence"``: prefix states (True) or whole states.
    state : {"sum", "mean"}
        Whether states are divided by the number of tokens they sum over.
    rescale : bool
        Whether to divide tokens by the power of two above. ``Phi`` is then
        ``2 ** (3 * exponent)`` times smaller than its definition.
    equilibration : Equilibration, optional
        Further powers of two for every coordinate; columns of ``Phi`` are multiplied by them.
    verbose : bool
        Show a progress bar over blocks.
    """

    def __init__(
        self,
        sequences: Sequences,
        backend: Backend,
        *,
        output: str = "last",
        causal: bool = True,
        state: str = "sum",
        rescale: bool = True,
        equilibration: Equilibration | None = None,
        verbose: bool = False,
    ) -> None:
        self.sequences = sequences
        self.backend = backend
        self.output = output
        self.causal = causal
        self.state = state
        self.exponent = math.frexp(sequences.largest)[1] if rescale and sequences.largest else 0
        self.equilibration = equilibration
        self.verbose = verbose
        lengths = sequences.lengths
        self.n_rows = int(lengths.sum()) if output == "sequence" else len(lengths)
        self.token_dim = sequences.token_dim
        self.n_features = n_cubic_features(self.token_dim)
        # Padding is cheap only among sequences of similar length: visit ragged ones by length.
        self._order = np.argsort(lengths, kind="stable") if sequences.is_ragged else None
        self._kept: list[list[Block]] = []  # of the first groups of sequences

    @cached_property
    def _first_row(self) -> np.ndarray:
        """Rows before each sequence, for ``output="sequence"``."""
        return np.concatenate([[0], np.cumsum(self.sequences.lengths)])

    @property
    def queries_per_state(self) -> int:
        """1, or the longest sequence where all its tokens read one state."""
        shared = self.output == "sequence" and not self.causal
        return int(self.sequences.lengths.max()) if shared else 1

    def take(self, chosen: np.ndarray, *, verbose: bool | None = None) -> Design:
        """The rows of the chosen sequences, with tokens divided by the same power of two.

        ``verbose=None`` keeps that of the whole.
        """
        if len(chosen) == len(self.sequences) and (np.diff(chosen) == 1).all():
            return self  # all of them in their order
        return Design(
            self.sequences.take(chosen),
            self.backend,
            output=self.output,
            causal=self.causal,
            state=self.state,
            rescale=self.exponent != 0,
            equilibration=self.equilibration,
            verbose=self.verbose if verbose is None else verbose,
        )

    def rows_of(self, chosen: np.ndarray) -> np.ndarray:
        """Positions of the rows that belong to the chosen sequences, in their order."""
        if self.output == "last":
            return chosen
        lengths = self.sequences.lengths[chosen]
        before = np.cumsum(lengths) - lengths
        return np.repeat(self._first_row[chosen] - before, lengths) + np.arange(lengths.sum())

    def blocks(self, description: str | None = None, isometric: bool = True) -> Iterator[Block]:
        """All rows, block by block.

        Parameters
        ----------
        description : str, optional
            Label of the progress bar.
        isometric : bool
            Whether off-diagonal entries of the states are multiplied by sqrt(2); without, integer
            tokens have integer states.
        """
        with tqdm(
            total=len(self.sequences), desc=description, unit="seq", disable=not self.verbose
        ) as bar:
            for index, chosen in enumerate(self._chunks()):
                if isometric and index < len(self._kept):
                    yield from self._kept[index]
                else:
                    yield from self._formed(chosen, isometric)
                bar.update(len(self.sequences.lengths[chosen]))

    def keep(self, n_bytes: int) -> Design:
        """The same rows for many passes: as many blocks as ``n_bytes`` hold are formed once.

        The others are formed from their tokens in every pass. No progress bar is shown.
        """
        kept: list[list[Block]] = []
        pairs = n_pairs(self.token_dim)
        for chosen in self._chunks():
            lengths = self.sequences.lengths[chosen]
            tokens = int(lengths.sum()) if self.output == "sequence" else len(lengths)
            states = tokens if self.causal else len(lengths)
            n_bytes -= 8 * (states * pairs + tokens * self.token_dim)
            if n_bytes < 0:
                break
            # A query may be a view of all tokens of its block, which need not be kept.
            kept.append(
                [replace(block, query=block.query + 0.0) for block in self._formed(chosen, True)]
            )
        design = copy(self)
        design._kept, design.verbose = kept, False
        return design

    def matvec(self, coef: Array) -> Array:
        """``Phi @ coef.T``: ``(m, p)`` to ``(rows, m)``."""
        out = self.backend.empty((self.n_rows, coef.shape[0]))
        by_pair = coef.reshape(coef.shape[0], -1, self.token_dim)
        pairs = used_pairs((by_pair != 0.0).any(2).any(0), self.backend)
        if pairs is not None:
            coef = by_pair[:, pairs].reshape(coef.shape[0], -1)
        for block in self.blocks():
            state = block.state if pairs is None else self.backend.take(block.state, pairs)
            block.scatter(predict_block(state, block.query, coef), out)
        return out

    def rmatvec(self, dual: Array) -> Array:
        """``dual.T @ Phi``: ``(rows, m)`` to ``(m, p)``."""
        total = self.backend.zeros((dual.shape[1], self.n_features))
        by_pair = total.reshape(dual.shape[1], -1, self.token_dim)
        for block in self.blocks():
            state, dual_block = block.state, block.gather(dual)
            pairs = used_pairs((state != 0.0).any(0), self.backend)
            if pairs is None:
                total += adjoint_block(state, block.query, dual_block)
            else:
                state = self.backend.take(state, pairs)
                part = adjoint_block(state, block.query, dual_block)
                by_pair[:, pairs] += part.reshape(len(by_pair), -1, self.token_dim)
        return total

    def _chunks(self) -> Iterator[slice | np.ndarray]:
        """Groups of sequences whose blocks respect the budgets."""
        n_samples, token_dim = len(self.sequences), self.token_dim
        target = min(max(_STATE_BUDGET // token_dim**2, _MIN_ROWS), _MAX_ROWS)
        per_row = self.output == "sequence"
        start = 0
        while start < n_samples:
            if self._order is None:
                longest = int(self.sequences.lengths[0])
            else:  # ascending lengths: the last member decides
                last = min(start + target, n_samples) - 1
                longest = int(self.sequences.lengths[self._order[last]])
            limit = min(target, _TOKEN_BUDGET // (longest * token_dim))
            if per_row and self.causal:
                limit = min(limit, target // longest)
            stop = min(start + max(1, limit), n_samples)
            yield slice(start, stop) if self._order is None else self._order[start:stop]
            start = stop

    def _formed(self, chosen: slice | np.ndarray, isometric: bool) -> Iterator[Block]:
        """The blocks of a group of sequences."""
        tokens = self.sequences.tokens(chosen, self.backend)
        lengths = self.sequences.lengths[chosen]
        if self.output == "last":
            yield self._last(tokens, lengths, chosen, isometric)
        elif self.causal:
            yield from self._causal(tokens, lengths, chosen, isometric)
        else:
            yield self._shared(tokens, lengths, chosen, isometric)

    def _last(
        self, tokens: Array, lengths: np.ndarray, chosen: slice | np.ndarray, isometric: bool
    ) -> Block:
        state = self._scaled(full_state(tokens, self.backend, isometric), lengths)
        return Block(state, self._query(tokens[:, -1:]), chosen, None, self.backend)

    def _shared(
        self, tokens: Array, lengths: np.ndarray, chosen: slice | np.ndarray, isometric: bool
    ) -> Block:
        state = self._scaled(full_state(tokens, self.backend, isometric), lengths)
        rows, present = self._token_rows(lengths, chosen, tokens.shape[1])
        return Block(state, self._query(tokens), rows, present, self.backend)

    def _causal(
        self, tokens: Array, lengths: np.ndarray, chosen: slice | np.ndarray, isometric: bool
    ) -> Iterator[Block]:
        """Prefix states; one very long sequence is cut and its state carried over."""
        n_samples, longest, token_dim = tokens.shape
        rows, present = self._token_rows(lengths, chosen, longest)
        step = longest if n_samples > 1 else _MAX_ROWS
        carried = None
        for start in range(0, longest, step):
            piece = tokens[:, start : start + step]
            states = prefix_states(piece, self.backend, carried, isometric)
            carried = states[:, -1].reshape(n_samples, -1) + 0.0  # scaling below is in place
            position = np.arange(start, start + piece.shape[1]) - (longest - lengths[:, None])
            state = self._scaled(
                states.reshape(-1, states.shape[2]), np.maximum(position.reshape(-1) + 1, 1)
            )
            query = self._query(piece).reshape(-1, 1, token_dim)
            if n_samples == 1:
                first = int(self._first_row[chosen][0]) + start
                rows = slice(first, first + piece.shape[1])
            elif present is not None:
                kept = np.flatnonzero(present)
                state, query = state[kept], query[kept]
            yield Block(state, query, rows, None, self.backend)

    def _token_rows(
        self, lengths: np.ndarray, chosen: slice | np.ndarray, longest: int
    ) -> tuple[slice | np.ndarray, np.ndarray | None]:
        """Design rows of the chosen sequences' tokens, and which padded slots are tokens."""
        if isinstance(chosen, slice):
            return slice(
                int(self._first_row[chosen.start]), int(self._first_row[chosen.stop])
            ), None
        within = np.arange(longest) - (longest - lengths[:, None])
        present = within >= 0
        return (self._first_row[chosen][:, None] + within)[present], present

    def _scaled(self, state: Array, counts: np.ndarray) -> Array:
        """Apply the power of two and, for mean states, the division by the token count."""
        if self.exponent:
            state *= math.ldexp(1.0, -2 * self.exponent)
        if self.state == "mean":
            state /= self.backend.asarray(counts)[:, None]
        if self.equilibration is not None:
            state *= self.backend.asarray(self.equilibration.pairs())
        return state

    def _query(self, tokens: Array) -> Array:
        query = tokens * math.ldexp(1.0, -self.exponent) if self.exponent else tokens
        if self.equilibration is not None:
            query = query * self.backend.asarray(self.equilibration.query)
        return query


def _powers_to_largest(sizes: np.ndarray) -> np.ndarray:
    """Powers of two that bring positive sizes to about the largest; 1 for zeros."""
    ratios = np.divide(sizes.max(), sizes, out=np.ones_like(sizes), where=sizes > 0.0)
    powers: np.ndarray = np.exp2(np.rint(np.log2(ratios)))
    return powers
