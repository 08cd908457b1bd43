r"""Matrix-free conjugate gradients with a Kronecker preconditioner.

For ``p`` and rows so many that neither ``p^2`` nor ``rows^2`` numbers fit into memory. One
iteration is one pass over the rows, ``w = Phi^T W Phi v`` for all outputs at once: two matrix
products of ``2 rows p m`` operations each, block by block, so that a packed state is read once.
Every output has its own step lengths.

**Preconditioner.** With ``s = svec(S)``, features are ``s (x) q``, so if ``s`` and ``q`` were
independent their weighted Gram matrix would be

.. math:: M = C_g \otimes C_q / \sum_i w_i, \qquad
          C_g = \sum_i w_i s_i s_i^T, \quad C_q = \sum_i w_i q_i q_i^T .

``M + alpha I`` is inverted by the singular value decompositions of the two small triangular
factors, which are computed from the rows without squaring their condition numbers. Directions
outside the range of ``C_g (x) C_q`` are outside the row space of ``Phi`` and are never entered.

**Minimum norm.** With ``alpha = 0`` and features that are singular on that range, a
preconditioner other than a multiple of the identity would lead to a solution of minimum
``M``-norm. So the problem is solved with one more target, ``Phi v`` for a random ``v`` of the
range: if ``v`` does not come back, part of the range is outside the row space, and iterations are
taken without preconditioner from zero, where they stay in the row space.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from tqdm import tqdm

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._design import Block, Design
from sklearn_mhla._features import by_output, by_pair, n_pairs, predict_by_pair, read_out
from sklearn_mhla._rounding import EPS, rank_tolerance
from sklearn_mhla.solvers._base import LeastSquaresProblem, ProblemSize, Solution, Solver
from sklearn_mhla.solvers._orthogonal import triangle_of_rows

# Reduction of the gradient after which it is computed anew from residuals.
_RENEW = 1e-12
# Relative error of the random coefficients from which on the features count as singular: one
# missing direction among 1e5 leaves 3e-3, one that is present is found to about tol.
_LOST = 1e-4


@dataclass(frozen=True)
class KroneckerInverse:
    """``V (M + alpha I)^-1 V^T`` for coefficients by pair, shape (P, m, d).

    Attributes
    ----------
    state_basis : array of shape (P, a)
    query_basis : array of shape (d, b)
        ``V`` is the Kronecker product of the two.
    eigenvalues : array of shape (a, b)
        Of ``M`` on its range.
    alpha : float
    """

    state_basis: Array
    query_basis: Array
    eigenvalues: Array
    alpha: float = 0.0

    @property
    def rank(self) -> int:
        """Dimension of the range."""
        return int(self.state_basis.shape[1] * self.query_basis.shape[1])

    @property
    def condition(self) -> float:
        """Of ``M + alpha I`` on the range."""
        if self.rank == 0:
            return 1.0
        return float((self.eigenvalues.max() + self.alpha) / (self.eigenvalues.min() + self.alpha))

    @property
    def amplification(self) -> float:
        """How ``M^-1/2`` magnifies the rounding of a gradient relative to its entries.

        Entries of ``Phi^T y`` are rounded relative to the norms of single features: the mean
        square of the result is ``mean_i M_ii (M^-1)_ii``, which factors and is free of units.
        """
        if self.rank == 0:
            return 1.0
        # Any split of the eigenvalues into a product serves.
        product = 1.0
        for basis, values in (
            (self.state_basis, self.eigenvalues[:, 0]),
            (self.query_basis, self.eigenvalues[0]),
        ):
            squares = basis**2
            product *= float(((squares @ values) * (squares @ (1.0 / values))).mean())
        return float(max(1.0, product) ** 0.5)

    def with_penalty(self, alpha: float) -> KroneckerInverse:
        """With ``alpha`` added to every eigenvalue."""
        return KroneckerInverse(self.state_basis, self.query_basis, self.eigenvalues, alpha)

    def flat(self) -> KroneckerInverse:
        """The projector onto the range times one number."""
        level = self.eigenvalues * 0.0 + self.eigenvalues.mean() if self.rank else self.eigenvalues
        return KroneckerInverse(self.state_basis, self.query_basis, level, self.alpha)

    def apply(self, gradient: Array) -> Array:
        """Preconditioned gradient."""
        return self._expand(self._contract(gradient) / (self.eigenvalues + self.alpha)[:, None])

    def project(self, coef: Array) -> Array:
        """The part of the coefficients that is in the range."""
        return self._expand(self._contract(coef))

    def random(self, backend: Backend) -> Array:
        """Coefficients (P, 1, d) of unit variance in every direction of the norm of ``M``."""
        shape = (self.eigenvalues.shape[0], 1, self.eigenvalues.shape[1])
        normal = backend.asarray(np.random.RandomState(0).standard_normal(shape))
        return self._expand(normal / self.eigenvalues[:, None] ** 0.5)

    def squared_norms(self, coef: Array) -> Array:
        """``<coef, M coef>`` of every output, shape (m,)."""
        return (self._contract(coef) ** 2 * self.eigenvalues[:, None]).sum(2).sum(0)

    def _contract(self, coef: Array) -> Array:
        pairs, n_outputs, token_dim = coef.shape
        inner = self.state_basis.mT @ coef.reshape(pairs, n_outputs * token_dim)
        return inner.reshape(-1, n_outputs, token_dim) @ self.query_basis

    def _expand(self, inner: Array) -> Array:
        wide = inner @ self.query_basis.mT
        flat = self.state_basis @ wide.reshape(len(wide), wide.shape[1] * wide.shape[2])
        return flat.reshape(len(flat), *wide.shape[1:])


class CGSolver(Solver):
    """Conjugate gradients on ``(Phi_c^T W Phi_c + alpha I) coef^T = Phi_c^T W y_c``.

    Parameters
    ----------
    problem : LeastSquaresProblem
    tol : float, default=0.0
        An output has converged when the norm of its gradient in the metric ``M^-1``, which does
        not depend on the units of single features, has fallen below ``tol`` times that of the
        zero model. 0 asks for what rounding allows.
    max_iter : int, default=2000
    start : array of shape (m, p), optional
        Coefficients to start from. Where the data do not determine all coefficients and
        ``alpha = 0``, the solution is then near the start rather than of minimum norm.
    verbose : bool, default=False
        Show a progress bar over iterations.
    """

    name = "cg"

    @staticmethod
    def memory(size: ProblemSize) -> int:
        """Two factors and bases, seven coefficient arrays, targets and residuals.

        Packed states of the rows are kept besides where there is room for them.
        """
        outputs = size.n_outputs + 1
        pairs = n_pairs(size.token_dim)
        return 8 * (12 * pairs**2 + 7 * size.n_features * outputs + 3 * size.n_rows * outputs)

    def __init__(
        self,
        problem: LeastSquaresProblem,
        *,
        tol: float = 0.0,
        max_iter: int = 2000,
        start: Array | None = None,
        verbose: bool = False,
    ) -> None:
        self.problem = problem
        self.backend = problem.backend
        self.tol = tol
        self.max_iter = max_iter
        self.verbose = verbose
        # Half of the memory is left to others.
        spare = self.backend.available_memory() // 2 - self.memory(problem.size)
        self.design: Design = problem.design.keep(spare)
        self.mean = self._mean_features() if problem.fit_intercept else None
        self.kronecker = self._second_moments()
        self.start: Array | None = None
        if start is not None:
            self.start = self.kronecker.project(by_pair(start, problem.design.token_dim))

    def solve(self, alpha: float) -> Solution:
        """Minimise; ``alpha = 0`` gives the solution of minimum norm, if there is no start."""
        problem, kronecker = self.problem, self.kronecker.with_penalty(alpha)
        if kronecker.rank > problem.largest_rank:
            coef, n_iter = self._iterate(problem.targets, alpha, kronecker.flat())
        elif alpha > 0.0 or self.start is not None:
            coef, n_iter = self._iterate(problem.targets, alpha, kronecker)
        else:
            coef, n_iter = self._minimum_norm(kronecker)
        coef = by_output(coef)
        intercept = problem.intercept(coef, None if self.mean is None else by_output(self.mean))
        rank = min(kronecker.rank, problem.largest_rank)
        return Solution(coef, intercept, rank, kronecker.condition, n_iter)

    def _minimum_norm(self, kronecker: KroneckerInverse) -> tuple[Array, int]:
        """Solution without penalty, again and without preconditioner if data are singular."""
        known = kronecker.random(self.backend)
        targets = _beside(self.problem.targets, self._predictions(known), self.backend)
        coef, n_iter = self._iterate(targets, 0.0, kronecker, probe=True)
        error = kronecker.squared_norms(coef[:, -1:] - known)
        complete = bool(error[0] <= _LOST**2 * kronecker.squared_norms(known)[0])
        if complete or n_iter >= self.max_iter:
            return coef[:, :-1], n_iter
        coef, more = self._iterate(self.problem.targets, 0.0, kronecker.flat())
        return coef, n_iter + more

    def _iterate(
        self,
        targets: Array,
        alpha: float,
        inverse: KroneckerInverse,
        probe: bool = False,
    ) -> tuple[Array, int]:
        """Conjugate gradients; gradients are computed anew until they are as small as asked."""
        backend, n_outputs = self.backend, targets.shape[1]
        coef = backend.zeros((n_pairs(self.design.token_dim), n_outputs, self.design.token_dim))
        gradient, squares = self._gradient(targets, coef, alpha)
        preconditioned = inverse.apply(gradient)
        initial = size = self._products(gradient, preconditioned)
        goal = self.tol**2 * initial
        # Times the squared residual: that of the gradient's rounding, where M is as large as the
        # Gram matrix.
        rounding = (8.0 * EPS * inverse.amplification) ** 2
        if self.start is not None:
            coef = self.start + 0.0
            gradient, squares = self._gradient(targets, coef, alpha)
            preconditioned = inverse.apply(gradient)
            size = self._products(gradient, preconditioned)
        n_iter, largest = 0, 1.0
        before = np.full(n_outputs, np.inf)
        with tqdm(desc="conjugate gradients", unit="it", disable=not self.verbose) as bar:
            # Outputs whose gradient no longer falls when it is computed anew are exact to rounding.
            while (
                open_ := (size > np.maximum(goal, rounding * largest * squares))
                & (size < 0.25 * before)
            ).any() and n_iter < self.max_iter:
                before = size
                goal_now = np.maximum(0.25 * goal, _RENEW**2 * size)
                direction = preconditioned
                while (
                    active := open_ & (size > np.maximum(goal_now, rounding * largest * squares))
                ).any() and n_iter < self.max_iter:
                    product = self._product(direction) + alpha * direction
                    curvature = self._products(direction, product)
                    active &= curvature > 0.0
                    step = np.divide(size, curvature, where=active, out=0.0 * size)
                    # Inverse steps are bounded by the largest eigenvalue of M^-1 G.
                    largest = max(largest, 1.0 / step.min(initial=1.0, where=step > 0.0))
                    coef += self._per_output(step) * direction
                    gradient -= self._per_output(step) * product
                    preconditioned = inverse.apply(gradient)
                    previous, size = size, self._products(gradient, preconditioned)
                    turn = np.divide(size, previous, where=active, out=0.0 * size)
                    direction = preconditioned + self._per_output(turn) * direction
                    n_iter += 1
                    bar.update()
                    bar.set_postfix(gradient=f"{_relative(size, initial).max():.1e}")
                gradient, squares = self._gradient(targets, coef, alpha)
                preconditioned = inverse.apply(gradient)
                size = self._products(gradient, preconditioned)
        # Predictions are rounded relative to |Phi| |coef|, and so are residuals of an exact fit.
        predictions = largest * backend.to_numpy(inverse.squared_norms(coef))
        unavoidable = 64.0 * largest * (rounding * squares + (8.0 * EPS) ** 2 * predictions)
        missed = size > np.maximum(goal, unavoidable)
        self._warn(np.where(missed, _relative(size, initial), 0.0)[: -1 if probe else None], n_iter)
        return coef, n_iter

    def _warn(self, missed: np.ndarray, n_iter: int) -> None:
        """Say how far outputs are from the tolerance, where rounding does not explain it."""
        if missed.any():
            warnings.warn(
                f"Conjugate gradients stopped after {n_iter} iterations with a relative gradient "
                f"of {missed.max():.1e} for {(missed > 0).sum()} of {len(missed)} outputs; "
                f"{self.tol:.1e} was asked for. Raise max_iter or tol, use alpha > 0, or "
                "method='primal' or 'dual' where they fit into memory.",
                ConvergenceWarning,
                stacklevel=5,
            )

    def _product(self, coef: Array) -> Array:
        """``Phi_c^T W Phi_c coef^T`` in one pass, all by pair."""
        pairs = len(coef)
        shift = self._mean_prediction(coef)
        total = self.backend.zeros((pairs, coef.shape[1] * coef.shape[2]))
        for block in self.design.blocks():
            image = predict_by_pair(block.state, block.query, coef)
            self._add_adjoint(total, block, image if shift is None else image - shift)
        return total.reshape(coef.shape)

    def _gradient(self, targets: Array, coef: Array, alpha: float) -> tuple[Array, np.ndarray]:
        """``Phi_c^T W r - alpha coef`` by pair with ``r = y_c - Phi_c coef^T``, and ``r^T W r``."""
        residual = targets - self._predictions(coef)
        if self.mean is not None:
            residual -= self.problem.mean(residual)  # so that no feature need be centred
        total = self.backend.zeros((len(coef), coef.shape[1] * coef.shape[2]))
        for block in self.design.blocks():
            self._add_adjoint(total, block, block.gather(residual))
        squares = (self.problem.weighted(residual) * residual).sum(0)
        return total.reshape(coef.shape) - alpha * coef, self.backend.to_numpy(squares)

    def _predictions(self, coef: Array) -> Array:
        """``Phi_c coef^T``, shape (rows, m)."""
        out = self.backend.empty((self.design.n_rows, coef.shape[1]))
        for block in self.design.blocks():
            block.scatter(predict_by_pair(block.state, block.query, coef), out)
        shift = self._mean_prediction(coef)
        return out if shift is None else out - shift

    def _add_adjoint(self, total: Array, block: Block, dual: Array) -> None:
        """Add the rows' weighted ``dual^T Phi``, by pair."""
        if self.problem.weights is not None:
            dual = dual * block.gather(self.problem.weights)
        self.backend.add_product(total, block.state.mT, read_out(block.query, dual))

    def _mean_prediction(self, coef: Array) -> Array | None:
        """``mean(phi) coef^T``, shape (m,); None without intercept."""
        return None if self.mean is None else (self.mean * coef).sum(2).sum(0)

    def _mean_features(self) -> Array:
        """Weighted mean of the features, shape (P, 1, d)."""
        design = self.design
        total = self.backend.zeros((n_pairs(design.token_dim), design.token_dim))
        for block in design.blocks():
            ones = self.backend.zeros((*block.query.shape[:2], 1)) + 1.0
            self._add_adjoint(total, block, ones)
        return total.reshape(-1, 1, design.token_dim) / self.problem.total_weight

    def _second_moments(self) -> KroneckerInverse:
        """``C_g (x) C_q / sum w`` on its range, from triangular factors of states and queries."""
        design, weights = self.design, self.problem.weights

        def states() -> Array:
            for block in design.blocks():
                n_states, n_queries = block.query.shape[:2]
                if weights is not None:
                    yield block.state * block.gather(weights).sum(1) ** 0.5
                elif block.present is None:
                    yield block.state * n_queries**0.5
                else:
                    count = block.present.reshape(n_states, n_queries).sum(1)
                    yield block.state * self.backend.asarray(count)[:, None] ** 0.5

        def queries() -> Array:
            for block in design.blocks():
                query = block.query
                if weights is not None:
                    query = query * block.gather(weights) ** 0.5
                yield query.reshape(-1, query.shape[2])

        (basis_g, values_g), (basis_q, values_q) = (
            self._range(triangle_of_rows(parts, width, self.backend))
            for parts, width in (
                (states(), n_pairs(design.token_dim)),
                (queries(), design.token_dim),
            )
        )
        weight = self.problem.total_weight
        return KroneckerInverse(basis_g, basis_q, values_g[:, None] ** 2 * values_q**2 / weight)

    def _range(self, triangle: Array) -> tuple[Array, Array]:
        """Right singular vectors (n, r) and singular values that are not rounding."""
        _, singular, right = self.backend.svd(triangle)
        kept = int((singular > rank_tolerance(triangle.shape[1]) * singular[0]).sum())
        return right[:kept].mT, singular[:kept]

    def _products(self, left: Array, right: Array) -> np.ndarray:
        """Inner products of every output, shape (m,); those here are negative by rounding only."""
        products = self.backend.to_numpy((left * right).sum(2).sum(0))
        positive: np.ndarray = np.maximum(products, 0.0)
        return positive

    def _per_output(self, values: np.ndarray) -> Array:
        return self.backend.asarray(values)[:, None]


def _beside(left: Array, right: Array, backend: Backend) -> Array:
    """One more output, the second axis."""
    joined = backend.empty((len(left), left.shape[1] + 1, *left.shape[2:]))
    joined[:, :-1], joined[:, -1:] = left, right
    return joined


def _relative(size: np.ndarray, initial: np.ndarray) -> np.ndarray:
    """Norms of gradients relative to those of the zero model."""
    ratio = np.divide(size, initial, where=initial > 0.0, out=0.0 * size)
    relative: np.ndarray = np.sqrt(ratio)
    return relative
