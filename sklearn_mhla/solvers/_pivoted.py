r"""Least squares in the span of the rows: pivoted Cholesky of the kernel, then ``rank`` unknowns.

With one-hot tokens the features of many rows span few dimensions. Pivoted Cholesky
(:mod:`sklearn_mhla._span`) writes the weighted rows as

.. math:: W^{1/2} \Phi = M B, \qquad M = W^{1/2} \, diag(\|\phi_i\|) \, L

with orthonormal rows ``B = L_p^{-1} Phi_p``, and the coefficients of minimum norm are ``B^T u``
with ``u`` the ridge solution for ``M``: a ``rank x rank`` system. The cost is ``rows r (r + P)``
multiply-adds, ``P = d (d + 1) / 2``, against ``rows^2 P / 2 + rows^3 / 6`` for the kernel form.
Queries without common coordinates (different one-hot symbols) give independent blocks of ``M``.
Repeated rows cost no more than being read.
"""

from __future__ import annotations

import numpy as np

from sklearn_mhla._backend import Array
from sklearn_mhla._features import adjoint_block, n_pairs, predict_block
from sklearn_mhla._pivoted_cholesky import Part, UnitRows, factor_parts, unit_rows
from sklearn_mhla._rounding import rank_tolerance
from sklearn_mhla.solvers._base import LeastSquaresProblem, ProblemSize, Solution, Solver, refine
from sklearn_mhla.solvers._factor import factorize

# The automatic choice looks for low rank in systems of this order or above, in a sample of rows
# that many times smaller.
_WORTH_A_LOOK = 2048
_SAMPLED = 8
# A rank below this share of the sample says that other rows will be in its span, too.
_DEFICIENT = 0.95
# A rank above this share of the smaller side of the design is not low.
_TOO_MANY = 0.4


class PivotedSolver(Solver):
    """``(M_c^T M_c + alpha I) u = M_c^T W^(1/2) y_c``, then ``coef = B^T u``.

    Parameters
    ----------
    problem : LeastSquaresProblem
    rows : UnitRows, optional
        Those of the design, if they are at hand.
    parts : list of Part, optional
        Their factorisation, if it is at hand.
    """

    name = "pivoted"

    @staticmethod
    def memory(size: ProblemSize) -> int:
        """States, queries and coefficients; ``rows x rank`` numbers come on top."""
        return 8 * (
            size.n_rows * (n_pairs(size.token_dim) + size.token_dim + 2 * size.n_outputs)
            + 2 * size.n_features * size.n_outputs
        )

    def __init__(
        self,
        problem: LeastSquaresProblem,
        rows: UnitRows | None = None,
        parts: list[Part] | None = None,
    ) -> None:
        self.problem = problem
        backend = problem.backend
        rows = unit_rows(problem.design) if rows is None else rows
        if parts is None:
            # L is copied when it grows.
            max_rank = backend.available_memory() // (16 * len(rows.norm))
            parts = _parts(problem, rows, max_rank=max_rank)
            if not all(part.factor.complete for part in parts):
                raise MemoryError(
                    f"method='pivoted' stores rows x rank numbers: the rank of these "
                    f"{len(rows.norm)} rows is above {max_rank}, for which memory suffices. Use "
                    "method='auto'."
                )
        self.parts = parts
        ones = backend.zeros((len(rows.norm), 1)) + 1.0
        self.root = ones if problem.weights is None else problem.weights**0.5
        self.norm = rows.norm[:, None]
        self.columns = []
        first = 0
        for part in parts:
            self.columns.append(slice(first, first + len(part.pivots)))
            first += len(part.pivots)
        self.rank = first
        self.weight = float((self.root**2).sum())
        # Mean of the rows of B, as (rank, 1).
        self.mean = self._adjoint(self.root) / self.weight if problem.fit_intercept else None

    def solve(self, alpha: float) -> Solution:
        """Minimise; ``alpha = 0`` gives the solution of minimum norm."""
        problem, mean = self.problem, self.mean
        if self.rank == 0:
            coef = self.coefficients(problem.backend.zeros((0, problem.size.n_outputs)))
            return Solution(coef, problem.target_mean, 0, 1.0, 0)
        offset = 0.0 if mean is None else self.weight * float((mean**2).sum())
        factor = factorize(self.gram, alpha, self.rank, offset, problem.backend)
        condition = max([factor.condition] + [part.factor.basis.condition for part in self.parts])

        def correct(residual: Array, coef: Array) -> Array:
            # Taken from the rows themselves: M and B are as inexact as L. Residuals have weighted
            # mean zero, so the features need no centring.
            gradient = problem.design.rmatvec(problem.weighted(residual))
            if alpha:
                gradient -= alpha * coef
            return self.coefficients(factor.solve(self.projection(gradient)))

        coef = self.coefficients(factor.solve(self._adjoint(self.root * problem.targets)))
        feature_mean = None
        if problem.fit_intercept:
            feature_mean = problem.design.rmatvec(self.root**2) / self.weight
        coef, intercept, n_iter = refine(problem, coef, feature_mean, condition, correct)
        rank = min(factor.rank, problem.largest_rank)
        return Solution(coef, intercept, rank, condition, n_iter)

    def gram(self) -> Array:
        """``M_c^T M_c``; its blocks are dense, what is between them comes from centring."""
        gram = self.problem.backend.zeros((self.rank, self.rank))
        for part, columns in zip(self.parts, self.columns, strict=True):
            block = gram[columns, columns]
            for rows, factor in part.factor.pieces:
                at = part.rows[rows]
                scaled = factor * (self.root[at] * self.norm[at])[:, 0]
                block[: len(factor), : len(factor)] += scaled @ scaled.mT
        if self.mean is not None:
            gram -= (self.weight * self.mean) * self.mean.mT
        return gram

    def _adjoint(self, values: Array) -> Array:
        """``M^T values``, shape (rank, m)."""
        backend = self.problem.backend
        values = values * (self.norm * self.root)
        out = backend.zeros((self.rank, values.shape[1]))
        for part, columns in zip(self.parts, self.columns, strict=True):
            block = out[columns]
            for rows, factor in part.factor.pieces:
                block[: len(factor)] += factor @ values[part.rows[rows]]
        return out

    def coefficients(self, inner: Array) -> Array:
        """``u^T B`` for ``u`` of shape (rank, m): shape (m, p)."""
        design, backend = self.problem.design, self.problem.backend
        n_outputs, pairs = inner.shape[1], n_pairs(design.token_dim)
        coef = backend.zeros((n_outputs, pairs, design.token_dim))
        for part, columns in zip(self.parts, self.columns, strict=True):
            basis = part.factor.basis
            dual = basis.combination(inner[columns])
            block = adjoint_block(basis.rows.state, basis.rows.query[:, None], dual[:, None])
            shape = (n_outputs, len(part.pairs), len(part.coordinates))
            coef[:, *self._entries(part)] = block.reshape(shape)
        return coef.reshape(n_outputs, pairs * design.token_dim)

    def projection(self, coef: Array) -> Array:
        """``B coef^T`` for ``coef`` of shape (m, p): shape (rank, m)."""
        design, backend = self.problem.design, self.problem.backend
        by_pair = coef.reshape(len(coef), n_pairs(design.token_dim), design.token_dim)
        out = backend.zeros((self.rank, len(coef)))
        for part, columns in zip(self.parts, self.columns, strict=True):
            basis = part.factor.basis
            own = by_pair[:, *self._entries(part)].reshape(len(coef), -1)
            read = predict_block(basis.rows.state, basis.rows.query[:, None], own)[:, 0]
            out[columns] = backend.solve_triangular(basis.lower, read)
        return out

    def _entries(self, part: Part) -> tuple[Array, Array]:
        """Where the entries that a part sees are among all pairs and coordinates."""
        backend = self.problem.backend
        return backend.index(part.pairs)[:, None], backend.index(part.coordinates)


def pivoted_if_low_rank(problem: LeastSquaresProblem) -> PivotedSolver | None:
    """The pivoted form where it is the cheapest: where the rows span few dimensions.

    Some rows, drawn at random, are factored first. If they are as good as independent, so may be
    the others, and nothing is to be gained: the look has cost a few per cent of the kernel
    form. Otherwise all rows are factored until the pivots are too many.
    """
    design = problem.design
    largest = min(design.n_rows, design.n_features)
    max_rank = int(_TOO_MANY * largest)
    per_row = n_pairs(design.token_dim) + design.token_dim + 2 * max_rank
    if largest < _WORTH_A_LOOK or 8 * design.n_rows * per_row > design.backend.available_memory():
        return None
    n_sequences = len(design.sequences)
    n_sampled = n_sequences * largest // (_SAMPLED * design.n_rows)
    sample = np.random.default_rng(0).permutation(n_sequences)[: max(n_sampled, 1)]
    sampled = unit_rows(design.take(np.sort(sample)))
    if len(sampled.norm) > largest // 2:  # few long sequences
        return None
    rank = sum(len(part.pivots) for part in _parts(problem, sampled, keep_rows=False))
    if rank > _DEFICIENT * len(sampled.norm):
        return None
    rows = unit_rows(design)
    parts = _parts(problem, rows, max_rank=max_rank)
    if not all(part.factor.complete for part in parts):
        return None
    return PivotedSolver(problem, rows, parts)


def _parts(
    problem: LeastSquaresProblem,
    rows: UnitRows,
    *,
    max_rank: int | None = None,
    keep_rows: bool = True,
) -> list[Part]:
    return factor_parts(
        rows,
        problem.backend,
        tol=rank_tolerance(min(len(rows.norm), problem.design.n_features)),
        max_rank=max_rank,
        keep_rows=keep_rows,
        verbose=problem.design.verbose,
    )
