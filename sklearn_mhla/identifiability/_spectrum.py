r"""Rank and eigenvalues of the second moment of the published features.

.. math:: \Lambda = \frac{1}{\sum_i w_i} \sum_i w_i H(Z_i) H(Z_i)^T,
          \qquad H[(j, k), l] = S_{jk} q_l \; (j \le k)

(Yau et al., arXiv 2410.10101, Algorithm 2: no sqrt(2) off the diagonal, nothing centred).

The units of the coordinates of the tokens must not decide its rank: ``Z -> Z diag(a)`` multiplies
feature ``(j, k), l`` by ``a_j a_k a_l`` and changes nothing else. Nor may features that are
nothing but rounding errors count: where coordinates ``j`` and ``k`` are orthogonal in every
sequence, ``S_jk`` is about ``eps sqrt(S_jj S_kk)``, not zero. So features are measured against
the bound of Cauchy and Schwarz,

.. math:: H[(j, k), l]^2 \le S_{jj} S_{kk} q_l^2,

whose mean over rows is the entry ``((j, j), l), ((k, k), l)`` of the second moment itself. With
``D`` its inverse root the eigenvalues of ``D Lambda D`` decide. Rounding perturbs the entries of
that matrix by a few ``eps`` whatever the units and the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import eigh, eigvalsh, qr, solve_triangular
from scipy.sparse.linalg import LinearOperator, eigsh

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._design import Design, Equilibration
from sklearn_mhla._features import adjoint_block, pair_indices, pair_scale, predict_block
from sklearn_mhla._gram import gram_bounds, gram_diagonal, unpack_gram
from sklearn_mhla._pivoted_cholesky import unit_rows
from sklearn_mhla._rounding import rank_tolerance
from sklearn_mhla._span import Span
from sklearn_mhla._sums import Sums
from sklearn_mhla.identifiability._error_bound import SecondMoment, leverage
from sklearn_mhla.identifiability._null_space import NullSpace
from sklearn_mhla.identifiability._proof import sums_lower_bound
from sklearn_mhla.solvers._factor import safe_cholesky

# Below this order dense eigenvalues are cheaper than a Krylov space.
_DENSE_ORDER = 64


class MomentSpectrum:
    """From the ``p x p`` matrix itself.

    One Cholesky factorisation (``p^3 / 3`` multiply-adds) where the matrix is safely definite,
    otherwise the eigenvalues of the scaled matrix (``2 p^3 / 3``), and their vectors
    (``9 p^3``) when they are needed. Of the eigenvalues of the matrix itself only the extremes
    are computed at once, the smallest from a factor: its relative error is ``eps`` times
    the condition number of the *scaled* matrix.

    Parameters
    ----------
    moments : Sums
    tol : float or None
        Eigenvalues of the scaled matrix below this times its largest count as zero.

    Attributes
    ----------
    rank : int
    max_eigenvalue : float
        In the units of rescaled tokens, as all eigenvalues here.
    min_eigenvalue : float
        Zero if the rank is not full.
    equilibration : Equilibration or None
        Units in which coverage is measured.
    """

    def __init__(self, moments: Sums, tol: float | None) -> None:
        self.moments = moments
        self.exponent = moments.token_exponent if moments.gram.any() else 0
        backend = moments.backend
        matrix = second_moment(moments)
        bounds = self._bounds()
        self.equilibration = self._equilibration()
        self.tol = rank_tolerance(len(matrix)) if tol is None else tol
        # The sum is a copy, which the factorisation overwrites.
        factor = safe_cholesky(matrix + 0.0, 0.0, self.tol, bounds, backend)
        self.rank = len(matrix) if factor is not None else self._rank(matrix)
        self.max_eigenvalue = largest_eigenvalue(lambda v: matrix @ v, len(matrix), backend)
        self.min_eigenvalue = 0.0
        if self.rank == len(matrix):
            solve = self._inverse() if factor is None else factor.solve
            self.min_eigenvalue = 1.0 / largest_eigenvalue(solve, len(matrix), backend)

    def eigenvalues(self) -> np.ndarray:
        """All ``p`` eigenvalues, descending; zeros beyond the rank."""
        matrix = self.moments.backend.to_numpy(second_moment(self.moments))
        found = np.array(eigvalsh(matrix, overwrite_a=True, check_finite=False)[::-1])
        found[self.rank :] = 0.0
        # Errors of these are relative to the largest, those of the extremes are not.
        np.maximum(found[: self.rank], self.min_eigenvalue, out=found[: self.rank])
        return found

    def lower_bound(self) -> float:
        """Proven lower bound of the smallest eigenvalue, in units of the user's tokens."""
        moments, longest = self.moments, self.moments.longest
        if self.rank < moments.n_features or longest is None:
            return 0.0
        return sums_lower_bound(moments, longest).value

    def null_space(self, k: int) -> np.ndarray:
        """``k`` orthonormal vectors (k, p) on which the second moment vanishes."""
        return self._null_vectors(k, np.ones(self.moments.n_features))

    def leverage(self, design: Design) -> np.ndarray:
        """``phi^T G^+ phi`` of rows, ``G`` the second moment of isometric features."""
        return leverage(design, self._decomposition)

    @cached_property
    def _decomposition(self) -> SecondMoment:
        moments = self.moments
        matrix = both_triangles(moments.gram_matrix(None), moments.backend) / moments.weight
        return SecondMoment.from_matrix(
            moments.backend.to_numpy(matrix), moments.token_dim, self.exponent, self.tol
        )

    def coverage(self) -> NullSpace:
        """What tells which inputs the data determine."""
        # v^T H = 0 with phi = D H, and features multiplied by E: (v / D / E)^T (E phi) = 0.
        token_dim = self.moments.token_dim
        factors = np.repeat(pair_scale(token_dim), token_dim)
        if self.equilibration is not None:
            factors = factors * self.equilibration.features()
        return NullSpace(self._null_vectors(self.moments.n_features - self.rank, factors))

    def _null_vectors(self, k: int, factors: np.ndarray) -> np.ndarray:
        """``k`` orthonormal null vectors of features multiplied by ``factors``."""
        scaling, _, vectors = self._scaled_eigh()
        null = vectors[:, : self.moments.n_features - self.rank]
        return orthonormal_null_vectors(
            null[:, :k], scaling / factors, lambda u: null @ (null.T @ u)
        )

    def _rank(self, matrix: Array) -> int:
        values = eigvalsh(self._scaled(matrix)[1], overwrite_a=True, check_finite=False)
        return int((values > self.tol * values[-1]).sum())

    def _inverse(self) -> Callable[[Array], Array]:
        """The inverse ``D (D A D)^-1 D`` from eigenvectors, where the rank is full."""
        backend = self.moments.backend
        scaling, values, vectors = (backend.asarray(part) for part in self._scaled_eigh())

        def solve(rhs: Array) -> Array:
            read = vectors.mT @ (scaling[:, None] * rhs)
            return scaling[:, None] * (vectors @ (read / values[:, None]))

        return solve

    def _scaled_eigh(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``D`` (p,), ascending eigenvalues and eigenvectors of ``D A D``."""
        scaling, scaled = self._scaled(second_moment(self.moments))
        values, vectors = eigh(scaled, overwrite_a=True, check_finite=False)
        return scaling, values, vectors

    def _scaled(self, matrix: Array) -> tuple[np.ndarray, np.ndarray]:
        """``D`` and ``D A D``; LAPACK's place is the CPU."""
        backend = self.moments.backend
        scaling = backend.to_numpy(backend.inverse_root_power_of_two(self._bounds()))
        scaled: np.ndarray = backend.to_numpy(matrix) * scaling[:, None]
        scaled *= scaling
        return scaling, scaled

    def _bounds(self) -> Array:
        """``mean(S_jj S_kk q_l^2)`` for every feature, shape (p,)."""
        moments = self.moments
        return gram_bounds(moments.gram, moments.token_dim) / moments.weight

    def _equilibration(self) -> Equilibration | None:
        moments, d = self.moments, self.moments.token_dim
        rows, columns = pair_indices(d)
        diagonal = gram_diagonal(moments.gram, d).reshape(-1, d)
        squares = moments.backend.to_numpy(diagonal)[rows == columns]  # of S_jj q_l, summed
        sizes = squares**0.5
        return Equilibration.of_sizes(sizes.max(1) ** 0.5, sizes.max(0))


class SpanSpectrum:
    """From a basis of the span of the rows, for fewer rows than features or a low rank.

    The rank is that of a pivoted Cholesky factorisation of the kernel (:mod:`sklearn_mhla._span`),
    ``rows r (r + P + d)`` multiply-adds. Eigenvalues are computed when asked for: the largest by a
    Krylov method on the rows, all of them from the ``rows x rows`` kernel.

    Parameters
    ----------
    design : Design
    weights : array of shape (rows, 1) or None
    tol : float or None
        Of the span.

    Attributes
    ----------
    rank : int
    equilibration : Equilibration or None
        Units in which the span was found and coverage is measured.
    """

    def __init__(self, design: Design, weights: Array | None, tol: float | None) -> None:
        self.weights = weights
        self._design: Design | None = design
        self.exponent = design.exponent
        self.token_dim = design.token_dim
        self.n_features = design.n_features
        self.equilibration = _equilibration(design)
        self._span = Span.from_design(
            equilibrated(design, self.equilibration), tol=tol, verbose=design.verbose
        )
        self.tol = self._span.tol
        self.rank = self._span.rank

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_design": None, "weights": None}

    @property
    def design(self) -> Design:
        """The rows, which are not pickled."""
        if self._design is None:
            raise ValueError(
                "This certificate was pickled, which leaves out the inputs; eigenvalues must be "
                "asked for before that, or the inputs certified again."
            )
        return self._design

    def coverage(self) -> Span:
        """What tells which inputs the data determine."""
        return self._span

    @property
    def max_eigenvalue(self) -> float:
        """Largest eigenvalue."""
        design, weights = self.design, self._normalised_weights()
        backend = design.backend
        scale = backend.asarray(np.repeat(pair_scale(self.token_dim), self.token_dim))

        def product(vector: Array) -> Array:
            read = design.matvec((vector / scale[:, None]).mT) * weights
            return design.rmatvec(read).mT / scale[:, None]

        return largest_eigenvalue(product, design.n_features, backend)

    @property
    def min_eigenvalue(self) -> float:
        """Smallest eigenvalue; zero if the rank is not full."""
        return 0.0 if self.rank < self.n_features else self._by_moments().min_eigenvalue

    def eigenvalues(self) -> np.ndarray:
        """All ``p`` eigenvalues, descending; zeros beyond the rank."""
        design = self.design
        order = min(design.n_rows, design.n_features)
        if 24 * order**2 > design.backend.available_memory():
            raise MemoryError(
                f"All eigenvalues would take {24 * order**2 / 1e9:.3g} GB. max_eigenvalue, rank, "
                "covers and null_space work without them."
            )
        if design.n_rows >= design.n_features:
            return self._by_moments().eigenvalues()
        values = eigvalsh(design.backend.to_numpy(self._kernel()), overwrite_a=True)[::-1]
        found = np.zeros(design.n_features)
        found[: self.rank] = np.maximum(values[: self.rank], 0.0)
        return found

    def lower_bound(self) -> float:
        """Proven lower bound of the smallest eigenvalue, in units of the user's tokens."""
        return 0.0 if self.rank < self.n_features else self._by_moments().lower_bound()

    def _by_moments(self) -> MomentSpectrum:
        design = self.design
        targets = design.backend.zeros((design.n_rows, 0))
        moments = Sums.from_design(design, targets, self.weights)
        return MomentSpectrum(moments, self.tol)

    def _kernel(self) -> Array:
        """``sqrt(w_i w_j) <H_i, H_j>`` for weights that sum to one."""
        rows = unit_rows(self.design)
        state = rows.state / self.design.backend.asarray(pair_scale(self.design.token_dim))
        kernel = state @ state.mT
        kernel *= rows.query @ rows.query.mT
        scale = rows.norm[:, None] * self._normalised_weights() ** 0.5
        kernel *= scale
        kernel *= scale.mT
        return kernel

    def leverage(self, design: Design) -> np.ndarray:
        """``phi^T G^+ phi`` of rows, ``G`` the second moment of isometric features.

        With ``B`` an orthonormal basis of the span and ``sqrt(w) Phi = X B`` with ``X = Q R``,
        ``G^+ = B^T (R^T R)^-1 B``: the leverage is the square of ``R^-T B phi``.
        """
        scale = np.ldexp(1.0, 3 * (design.exponent - self.exponent))
        total = np.zeros(design.n_rows)
        for (coordinates, norm), upper in zip(
            self._coordinates(design), self._factors, strict=True
        ):
            reached = solve_triangular(upper, coordinates * (scale * norm), trans="T")
            total += (reached**2).sum(0)
        return np.where(self._span.covers(design), total, np.inf)

    @cached_property
    def _factors(self) -> list[np.ndarray]:
        """``R`` of the rows of every part of the span."""
        backend = self._span.backend
        weights = backend.to_numpy(self._normalised_weights())[:, 0] ** 0.5
        rows = self._coordinates(equilibrated(self.design, self.equilibration))
        return [
            np.asarray(np.linalg.qr((coordinates * (norm * weights)).T, mode="r"))
            for coordinates, norm in rows
        ]

    def _coordinates(self, design: Design) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Coordinates (r', rows) of unit features in every part of the span, and the norms."""
        backend, rows = self._span.backend, unit_rows(design)
        for part in self._span.parts:
            touched, own = part.entries(rows, backend)
            coordinates = backend.zeros((len(part.pivots), design.n_rows))
            coordinates[:, touched] = part.factor.basis.coordinates(own)
            yield backend.to_numpy(coordinates), backend.to_numpy(rows.norm)

    def null_space(self, k: int) -> np.ndarray:
        """``k`` orthonormal vectors (k, p) on which the second moment vanishes.

        Random vectors minus their projections on the span.
        """
        backend = self._span.backend
        factors = np.repeat(pair_scale(self.token_dim), self.token_dim)
        if self.equilibration is not None:
            factors = factors * self.equilibration.features()
        return orthonormal_null_vectors(
            np.random.default_rng(0).standard_normal((self.n_features, k)),
            factors,
            lambda u: backend.to_numpy(self._outside(backend.asarray(u.T))).T,
        )

    def _outside(self, vectors: Array) -> Array:
        """``vectors`` (k, p) minus their projections on the span."""
        backend = self._span.backend
        rest = vectors.reshape(len(vectors), -1, self.token_dim) + 0.0
        for part in self._span.parts:
            basis = part.factor.basis
            pairs, coordinates = backend.index(part.pairs), backend.index(part.coordinates)
            own = rest[:, pairs[:, None], coordinates]
            read = predict_block(
                basis.rows.state, basis.rows.query[:, None], own.reshape(len(vectors), -1)
            )
            found = backend.solve_triangular(basis.lower, backend.asarray(read[:, 0]))
            combination = basis.combination(found)
            inside = adjoint_block(
                basis.rows.state, basis.rows.query[:, None], combination[:, None]
            )
            rest[:, pairs[:, None], coordinates] = own - inside.reshape(own.shape)
        return rest.reshape(vectors.shape)

    def _normalised_weights(self) -> Array:
        """Weights (rows, 1) that sum to one."""
        if self.weights is None:
            return self.design.backend.zeros((1, 1)) + 1.0 / self.design.n_rows
        return self.weights / self.weights.sum()


def second_moment(moments: Sums) -> Array:
    """``Lambda`` of rescaled tokens, shape (p, p), both triangles."""
    backend = moments.backend
    matrix = both_triangles(unpack_gram(moments.gram, moments.token_dim, backend), backend)
    matrix /= moments.weight
    return matrix


def both_triangles(lower: Array, backend: Backend) -> Array:
    """A symmetric matrix of which only the lower triangle is meaningful, written out."""
    lower = backend.tril(lower)
    diagonal = lower.diagonal() + 0.0
    full = lower + lower.mT
    full.reshape(-1)[:: len(full) + 1] = diagonal
    return full


def largest_eigenvalue(product: Callable[[Array], Array], order: int, backend: Backend) -> float:
    """Largest eigenvalue of a positive semidefinite operator on arrays of shape (n, k)."""
    if order <= _DENSE_ORDER:
        dense = backend.to_numpy(product(backend.asarray(np.eye(order))))
        return max(0.0, float(eigvalsh(0.5 * (dense + dense.T))[-1]))

    def matvec(vector: np.ndarray) -> np.ndarray:
        image = backend.to_numpy(product(backend.asarray(vector.reshape(-1, 1))))
        return image.reshape(-1)

    start = np.random.default_rng(0).standard_normal(order)
    if not matvec(start).any():  # ARPACK does not take the zero matrix
        return 0.0
    operator = LinearOperator((order, order), matvec=matvec, dtype=np.float64)
    return float(eigsh(operator, k=1, which="LA", v0=start, return_eigenvectors=False)[0])


def orthonormal_null_vectors(
    trial: np.ndarray, units: np.ndarray, outside: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Orthonormal vectors (k, p) of the form ``units * u`` with ``u`` in a null space.

    Orthonormalising after a change of units undoes part of the projection where the units differ
    much, and projecting again a part of the orthonormality; both are settled after three rounds.

    Parameters
    ----------
    trial : ndarray of shape (p, k)
        Columns ``u``, in the null space or not.
    units : ndarray of shape (p,)
        What they are multiplied by.
    outside : callable
        The projection on the null space.
    """
    vectors = trial
    for _ in range(3):
        vectors = qr(units[:, None] * outside(vectors), mode="economic", check_finite=False)[0]
        vectors = vectors / units[:, None]
    return np.ascontiguousarray((units[:, None] * vectors).T)


def equilibrated(design: Design, equilibration: Equilibration | None) -> Design:
    """The same rows with coordinates brought to about the same size."""
    return Design(
        design.sequences,
        design.backend,
        output=design.output,
        causal=design.causal,
        state=design.state,
        equilibration=equilibration,
        verbose=design.verbose,
    )


def _equilibration(design: Design) -> Equilibration | None:
    rows, columns = pair_indices(design.token_dim)
    same = design.backend.index(np.flatnonzero(rows == columns))
    state, query = np.zeros(design.token_dim), np.zeros(design.token_dim)
    for block in design.blocks("sizes"):
        state += design.backend.to_numpy(design.backend.take(block.state, same).sum(0))
        query += design.backend.to_numpy((block.query**2).sum((0, 1)))
    return Equilibration.of_sizes(state**0.5, query**0.5)
