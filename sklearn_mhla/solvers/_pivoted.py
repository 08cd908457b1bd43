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
from sklearn_mhla._features import adjoint_block, n_pairs
from sklearn_mhla._span import Part, UnitRows, factor_parts, span_tolerance, unit_rows
from sklearn_mhla.solvers._base import LeastSquaresProblem, ProblemSize, Solution, Solver, refine
from sklearn_mhla.solvers._dual import DualSolver
from sklearn_mhla.solvers._factor import factorize

# The automatic choice looks for low rank among every eighth of so many rows or more.
_WORTH_A_LOOK = 2048
_SAMPLED = 8
# A rank below this share of the sampled rows says that others will be in their span, too.
_DEFICIENT = 0.95
# At this share of the rows the pivoted form costs about as much as the kernel form.
_TOO_MANY = 0.5


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
        self.parts = parts = _parts(problem, rows) if parts is None else parts
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
            return Solution(
                self.coefficients(0.0 * self.root[:0] * problem.targets[:0]),
                problem.target_mean,
                0,
                1.0,
                0,
            )
        offset = 0.0 if mean is None else self.weight * float((mean**2).sum())
        factor = factorize(self.gram, alpha, self.rank, offset, problem.backend)
        inner = factor.solve(self._adjoint(self.root * problem.targets))

        def correct(residual: Array, _: Array) -> Array:
            # Residuals have weighted mean zero, so M needs no centring.
            nonlocal inner
            step = factor.solve(self._adjoint(self.root * residual) - alpha * inner)
            inner = inner + step
            return self.coefficients(step)

        coef = self.coefficients(inner)
        feature_mean = None if mean is None else self.coefficients(mean)
        coef, intercept, n_iter = refine(problem, coef, feature_mean, factor.condition, correct)
        rank = min(factor.rank, problem.largest_rank)
        return Solution(coef, intercept, rank, factor.condition, n_iter)

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
        """``B^T u``, shape (m, p)."""
        design, backend = self.problem.design, self.problem.backend
        n_outputs, pairs = inner.shape[1], n_pairs(design.token_dim)
        coef = backend.zeros((n_outputs, pairs, design.token_dim))
        for part, columns in zip(self.parts, self.columns, strict=True):
            basis = part.factor.basis
            dual = basis.combination(inner[columns])
            block = adjoint_block(basis.rows.state, basis.rows.query[:, None], dual[:, None])
            at = backend.index(part.pairs)[:, None], backend.index(part.coordinates)
            coef[:, *at] = block.reshape(n_outputs, len(part.pairs), len(part.coordinates))
        return coef.reshape(n_outputs, pairs * design.token_dim)


def pivoted_or_dual(problem: LeastSquaresProblem) -> Solver:
    """The pivoted form where the rows turn out to span few dimensions, else the kernel form.

    An eighth of the rows, drawn at random, is factored first: if they are as good as independent,
    so may be the others, and nothing is to be gained. Otherwise all rows are, until the
    pivots are too many.
    """
    n_rows = problem.design.n_rows
    if n_rows < _WORTH_A_LOOK:
        return DualSolver(problem)
    rows, backend = unit_rows(problem.design), problem.backend
    sample = np.random.default_rng(0).permutation(n_rows)[: n_rows // _SAMPLED]
    sampled = _parts(problem, rows.take(backend.index(sample)), keep_rows=False)
    if sum(len(part.pivots) for part in sampled) < _DEFICIENT * len(sample):
        parts = _parts(problem, rows, max_rank=int(_TOO_MANY * n_rows))
        if all(part.factor.complete for part in parts):
            return PivotedSolver(problem, rows, parts)
    return DualSolver(problem)


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
        tol=span_tolerance(min(len(rows.norm), problem.design.n_features)),
        max_rank=max_rank,
        keep_rows=keep_rows,
        verbose=problem.design.verbose,
    )
