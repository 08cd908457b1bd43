r"""Gauss-Newton normal equations for heads, in three metrics.

For heads ``V`` (H, m, d) and ``Q`` (H, d, d) the loss is half a sum of squares whose residuals
are bilinear in ``(V, Q)``:

.. math:: f_a(S, q) = \sum_h V_h[a] \, S \, Q_h \, q, \qquad
          u_h = S Q_h q = \partial f_a / \partial V_h[a], \qquad
          t_{ah} = S V_h[a]^T, \quad t_{ah} q^T = \partial f_a / \partial Q_h .

``u`` does not depend on the output ``a``, so the ``V`` block of the normal equations is one
``(H d) x (H d)`` matrix for all outputs. The ``Q`` block has entries
``sum_i (sum_a t_{ahk} t_{ah'k'})_i (q_l q_l')_i``: like the Gram matrix of the cubic features it is
symmetric in two pairs separately, and one product of two small factors accumulates it.

* :class:`RowEquations` sums over the rows of a design (memory independent of ``p``);
* :class:`MomentEquations` works in the metric of accumulated moments (no row is touched);
* :class:`CoefficientEquations` measures the distance of coefficients (no data).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.linalg import norm

from sklearn_mhla._backend import Array
from sklearn_mhla._design import Block
from sklearn_mhla._features import packed_products, pair_indices, pair_scale, smat
from sklearn_mhla._gram import unpack_gram
from sklearn_mhla._heads import Heads, coef_to_tensor, heads_to_coef
from sklearn_mhla.solvers._base import LeastSquaresProblem


@dataclass
class NormalEquations:
    """Value, gradient and Gauss-Newton matrix of a loss at one pair ``(V, Q)``.

    Attributes
    ----------
    loss : float
        Half the (weighted, penalised) sum of squared residuals.
    value_matrix : ndarray of shape (H d, H d)
        ``V`` block, the same for every output.
    mixed : ndarray of shape (m, H d, H d^2)
        Block of ``V[:, a]`` against ``Q``.
    query_matrix : ndarray of shape (H d^2, H d^2)
        ``Q`` block.
    value_gradient : ndarray of shape (m, H d)
    query_gradient : ndarray of shape (H d^2,)
    """

    loss: float
    value_matrix: np.ndarray
    mixed: np.ndarray
    query_matrix: np.ndarray
    value_gradient: np.ndarray
    query_gradient: np.ndarray

    def largest(self) -> float:
        """Largest diagonal entry of the Gauss-Newton matrix."""
        return float(max(self.value_matrix.diagonal().max(), self.query_matrix.diagonal().max()))

    def matrix(self) -> np.ndarray:
        """The Gauss-Newton matrix; unknowns in the order ``V`` (m, H d), then ``Q`` (H d^2)."""
        n_outputs, size, order = self.mixed.shape
        split = n_outputs * size
        full = np.zeros((split + order, split + order))
        for a in range(n_outputs):
            block = slice(a * size, (a + 1) * size)
            full[block, block] = self.value_matrix
            full[block, split:] = self.mixed[a]
            full[split:, block] = self.mixed[a].T
        full[split:, split:] = self.query_matrix
        return full

    def relative_gradient(self, scale: float) -> float:
        """``||J^T r|| / (||J||_F ||y||)``, between 0 and 1; ``scale`` is ``||y||^2 / 2``."""
        gradient = np.hypot(norm(self.value_gradient), norm(self.query_gradient))
        n_outputs = len(self.value_gradient)
        jacobian = n_outputs * self.value_matrix.trace() + self.query_matrix.trace()
        bound = np.sqrt(2.0 * scale * jacobian)
        return float(gradient / bound) if bound > 0.0 else 0.0

    def add(self, other: NormalEquations, factor: float) -> None:
        """Add ``factor`` times another loss, in place."""
        self.loss += factor * other.loss
        for name in (
            "value_matrix",
            "mixed",
            "query_matrix",
            "value_gradient",
            "query_gradient",
        ):
            total: np.ndarray = getattr(self, name)
            total += factor * getattr(other, name)


class HeadLoss(Protocol):
    """What the head solvers need to know of a loss."""

    def loss(self, heads: Heads) -> float:
        """Value only."""

    def equations(self, heads: Heads) -> NormalEquations:
        """Value, gradient and Gauss-Newton matrix."""


class CoefficientEquations:
    r"""``1/2 ||coef(V, Q) - target||^2``, the distance of packed coefficients.

    With the isometric packing this is half the squared Frobenius norm of the symmetrised tensor
    ``W - C``, so every block has a closed form; the ``Q`` block is block-diagonal in ``l``.

    Parameters
    ----------
    target : ndarray of shape (m, d, d, d)
        Coefficient tensor ``C``, symmetric in its two middle axes.
    """

    def __init__(self, target: np.ndarray) -> None:
        self.target = target

    def loss(self, heads: Heads) -> float:
        """Value only."""
        return 0.5 * float((self._residual(heads) ** 2).sum())

    def equations(self, heads: Heads) -> NormalEquations:
        """Value, gradient and Gauss-Newton matrix."""
        value, query = heads
        n_heads, n_outputs, d = value.shape
        residual = self._residual(heads)
        identity = np.eye(d)
        value_matrix = 0.5 * (
            np.einsum("hkl,gkl,ij->higj", query, query, identity, optimize=True)
            + np.einsum("hjl,gil->higj", query, query, optimize=True)
        )
        mixed = 0.5 * (
            np.einsum("gaj,hkl->ahjgkl", value, query, optimize=True)
            + np.einsum("gai,hil,jk->ahjgkl", value, query, identity, optimize=True)
        )
        by_output = 0.5 * (
            np.einsum("haj,gaj,ki->hkgi", value, value, identity, optimize=True)
            + np.einsum("hai,gak->hkgi", value, value, optimize=True)
        )
        query_matrix = np.einsum("hkgi,lm->hklgim", by_output, identity)
        size = n_heads * d
        return NormalEquations(
            0.5 * float((residual**2).sum()),
            value_matrix.reshape(size, size),
            mixed.reshape(n_outputs, size, size * d),
            query_matrix.reshape(size * d, size * d),
            *_gradients(residual, heads),
        )

    def _residual(self, heads: Heads) -> np.ndarray:
        tensor = np.einsum("haj,hkl->ajkl", heads.value, heads.key_query, optimize=True)
        residual: np.ndarray = 0.5 * (tensor + tensor.swapaxes(1, 2)) - self.target
        return residual


class MomentEquations:
    r"""``1/2 sum_a (c_a - c*_a)^T (G + alpha I) (c_a - c*_a)``, from moments alone.

    ``c*`` minimises the unrestricted problem, so this is the penalised least-squares loss minus
    its unrestricted minimum. Written around ``c*`` it has full relative accuracy near zero,
    which ``y^T y - 2 c^T b + c^T G c`` has not.

    Parameters
    ----------
    gram : ndarray of shape (p, p)
        ``G + alpha I``, both triangles.
    coef : ndarray of shape (m, p)
        ``c*``.
    token_dim : int
    """

    def __init__(self, gram: np.ndarray, coef: np.ndarray, token_dim: int) -> None:
        self.gram = gram
        self.coef = coef
        self.token_dim = token_dim
        d = token_dim
        rows, columns = pair_indices(d)
        self._pair = np.empty((d, d), dtype=np.intp)
        self._pair[rows, columns] = self._pair[columns, rows] = np.arange(len(rows))
        # Half the scale off the diagonal: a pair's coefficient is scale / 2 (W_jk + W_kj).
        self._half = 0.5 * pair_scale(d)[self._pair] * (1.0 + np.eye(d))
        self._rows = gram.reshape(len(rows), d, len(gram))

    def loss(self, heads: Heads) -> float:
        """Value only."""
        error = heads_to_coef(*heads) - self.coef
        return 0.5 * float((error * (error @ self.gram)).sum())

    def equations(self, heads: Heads) -> NormalEquations:
        """Value, gradient and Gauss-Newton matrix."""
        value, query = heads
        n_heads, n_outputs, d = value.shape
        size = n_heads * d
        error = heads_to_coef(value, query) - self.coef
        image = error @ self.gram
        basis = self._basis(query)
        value_matrix = basis @ (basis @ self.gram).T
        mixed = np.empty((n_outputs, size, size * d))
        query_matrix = np.zeros((size * d, size * d))
        for a in range(n_outputs):
            # Row (h, k, l): Gram rows of the packed coefficients of V_h[a] (x) e_k e_l^T.
            lifted = self._lift(value[:, a])
            mixed[a] = basis @ lifted.T
            query_matrix += self._lower(lifted, value[:, a])
        return NormalEquations(
            0.5 * float((error * image).sum()),
            value_matrix,
            mixed,
            query_matrix,
            *_gradients(coef_to_tensor(image, d), heads),
        )

    def _basis(self, key_query: np.ndarray) -> np.ndarray:
        """Packed coefficients of ``e_j (x) Q_h`` in row (h, j): shape (H d, p)."""
        n_heads, d, _ = key_query.shape
        basis = np.zeros((n_heads, d, d * (d + 1) // 2, d))
        for j in range(d):
            basis[:, j, self._pair[j]] = self._half[j, :, None] * key_query
        return basis.reshape(n_heads * d, -1)

    def _lift(self, value: np.ndarray) -> np.ndarray:
        """``D G`` of shape (H d^2, p) for one output's value rows (H, d)."""
        n_heads, d = value.shape
        out = np.empty((n_heads, d, d * len(self.gram)))
        for k in range(d):
            weights = value * self._half[:, k]  # (H, j)
            out[:, k] = weights @ self._rows[self._pair[:, k]].reshape(d, -1)
        return out.reshape(n_heads * d * d, len(self.gram))

    def _lower(self, lifted: np.ndarray, value: np.ndarray) -> np.ndarray:
        """``(D G) D^T`` of shape (H d^2, H d^2)."""
        n_heads, d = value.shape
        rows = len(lifted)
        packed = lifted.reshape(rows, -1, d)
        out = np.empty((rows, n_heads, d, d))
        for k in range(d):
            weights = value * self._half[:, k]
            out[:, :, k] = np.tensordot(weights, packed[:, self._pair[:, k]], (1, 1)).swapaxes(0, 1)
        return out.reshape(rows, rows)


class RowEquations:
    """``1/2 sum_i w_i ||y_i - b - f(Z_i)||^2 + alpha/2 ||coef||^2`` over the rows of a design.

    The intercept ``b`` is eliminated: at every ``(V, Q)`` it takes its best value, which centres
    residuals and Jacobian. One evaluation takes two passes over the rows; memory is that of
    the normal equations and of one block.

    Parameters
    ----------
    problem : LeastSquaresProblem
    alpha : float
    """

    def __init__(self, problem: LeastSquaresProblem, alpha: float) -> None:
        self.problem = problem
        self.alpha = alpha
        d = problem.design.token_dim
        self._penalty = CoefficientEquations(np.zeros((problem.targets.shape[1], d, d, d)))

    def loss(self, heads: Heads) -> float:
        """Value only."""
        residual, _ = self.residual(heads)
        return self._value(residual, heads)

    def residual(self, heads: Heads) -> tuple[Array, Array]:
        """``f(Z_i) + b - y_i`` of shape (rows, m) with the best ``b``, and that ``b``."""
        backend = self.problem.backend
        by_value = backend.asarray(_by_head(heads.value))
        residual = backend.empty(tuple(self.problem.targets.shape))
        for block in self.problem.design.blocks():
            state, query = _factors(block)
            reads = _reads(state, query, backend.asarray(heads.key_query))
            residual[block.rows] = reads @ by_value
        residual -= self.problem.targets
        intercept = self.problem.target_mean
        if self.problem.fit_intercept:
            shift = self.problem.mean(residual)
            residual -= shift
            intercept = intercept - shift
        return residual, intercept

    def equations(self, heads: Heads) -> NormalEquations:
        """Value, gradient and Gauss-Newton matrix."""
        problem, backend, d = self.problem, self.problem.backend, self.problem.design.token_dim
        n_heads, n_outputs, _ = heads.value.shape
        size = n_heads * d
        key_query = backend.asarray(heads.key_query)
        by_output = backend.asarray(heads.value.swapaxes(0, 1).reshape(-1, d))
        residual, _ = self.residual(heads)
        pair_rows, pair_columns = pair_indices(size)
        pairs = backend.index(pair_rows * size + pair_columns)

        value_matrix = backend.zeros((size, size))
        mixed = backend.zeros((n_outputs, size, size * d))
        packed = backend.zeros((len(pair_rows), d * (d + 1) // 2))
        value_gradient = backend.zeros((n_outputs, size))
        query_gradient = backend.zeros((size, d))
        reads_mean = backend.zeros((1, size))
        slope_mean = backend.zeros((n_outputs, size * d))
        for block in problem.design.blocks():
            state, query = _factors(block)
            root = self._root(block)
            reads = _reads(state, query, key_query) * root
            # slopes[i, a, (h, k)] = sqrt(w_i) (S_i V_h[a]^T)_k
            slopes = (by_output @ state).reshape(-1, n_outputs, size) * root[:, :, None]
            error = root * residual[block.rows]
            value_matrix += reads.mT @ reads
            value_gradient += error.mT @ reads
            query_gradient += (error[:, None] @ slopes)[:, 0].mT @ query
            for a in range(n_outputs):
                jacobian = (slopes[:, a, :, None] * query[:, None, :]).reshape(-1, size * d)
                mixed[a] += reads.mT @ jacobian
                slope_mean[a] += (root.mT @ jacobian)[0]
            reads_mean += root.mT @ reads
            products = backend.take((slopes.mT @ slopes).reshape(-1, size * size), pairs)
            query_products = packed_products(query, backend)
            backend.add_product(packed, backend.asarray(products.mT), query_products)
        query_matrix = unpack_gram(packed, d, backend)
        if problem.fit_intercept:  # centre the Jacobian
            total = problem.total_weight
            value_matrix -= reads_mean.mT @ reads_mean / total
            mixed -= reads_mean.mT[None] * slope_mean[:, None] / total
            query_matrix -= slope_mean.mT @ slope_mean / total
        lower = np.tril(backend.to_numpy(query_matrix), -1)
        equations = NormalEquations(
            self._squares(residual),
            backend.to_numpy(value_matrix),
            backend.to_numpy(mixed),
            lower + lower.T + np.diag(backend.to_numpy(query_matrix).diagonal()),
            backend.to_numpy(value_gradient),
            backend.to_numpy(query_gradient).reshape(-1),
        )
        if self.alpha > 0.0:
            equations.add(self._penalty.equations(heads), self.alpha)
        return equations

    def _squares(self, residual: Array) -> float:
        return 0.5 * float((self.problem.weighted(residual) * residual).sum())

    def _value(self, residual: Array, heads: Heads) -> float:
        penalty = self.alpha * self._penalty.loss(heads) if self.alpha > 0.0 else 0.0
        return self._squares(residual) + penalty

    def _root(self, block: Block) -> Array:
        """Square roots of the weights of a block's rows, shape (n, 1)."""
        weights = self.problem.weights
        if weights is None:
            n_rows = self.problem.targets[block.rows].shape[0]
            return self.problem.backend.zeros((n_rows, 1)) + 1.0
        return weights[block.rows] ** 0.5


def directional_derivatives(block: Block, heads: Heads, directions: Heads) -> Array:
    r"""Change of the predictions of a block's rows along directions ``(dV, dQ)``.

    .. math:: \sum_h dV_h S Q_h q + V_h S \, dQ_h q

    Parameters
    ----------
    block : Block
    heads : Heads
    directions : Heads
        With a leading axis: ``value`` (k, H, m, d) and ``key_query`` (k, H, d, d).

    Returns
    -------
    array of shape (n, m, k)
    """
    backend = block.backend
    count, n_heads, n_outputs, d = directions.value.shape
    state, query = _factors(block)
    reads = _reads(state, query, backend.asarray(heads.key_query))
    by_output = directions.value.swapaxes(1, 2).reshape(count * n_outputs, n_heads * d)
    change = (reads @ backend.asarray(by_output).mT).reshape(-1, count, n_outputs).mT
    by_value = backend.asarray(heads.value.swapaxes(0, 1).reshape(-1, d))
    slopes = (by_value @ state).reshape(-1, n_outputs, n_heads * d)
    asked = query @ backend.asarray(directions.key_query.reshape(-1, d)).mT
    return change + slopes @ asked.reshape(-1, count, n_heads * d).mT


def _by_head(value: np.ndarray) -> np.ndarray:
    """Value matrices (H, m, d) as (H d, m)."""
    return value.swapaxes(1, 2).reshape(-1, value.shape[1])


def _factors(block: Block) -> tuple[Array, Array]:
    """States (n, d, d) and queries (n, d) of the rows of a block, one state per row."""
    backend = block.backend
    state = smat(block.state, block.query.shape[2], backend)
    if block.query.shape[1] == 1:
        return state, block.query[:, 0]
    _, n_queries, d = block.query.shape
    shared = (state[:, None] + backend.zeros((1, n_queries, 1, 1))).reshape(-1, d, d)
    query = block.query.reshape(-1, d)
    if block.present is None:
        return shared, query
    kept = np.flatnonzero(block.present)
    return shared[kept], query[kept]


def _reads(state: Array, query: Array, key_query: Array) -> Array:
    """``u_h = S Q_h q`` of every row, shape (n, H d)."""
    n_heads, d, _ = key_query.shape
    asked = (query @ key_query.reshape(n_heads * d, d).mT).reshape(-1, n_heads, d)
    return (asked @ state).reshape(-1, n_heads * d)


def _gradients(residual: np.ndarray, heads: Heads) -> tuple[np.ndarray, np.ndarray]:
    """Gradients in ``V`` (m, H d) and ``Q`` (H d^2,) from that in the symmetrised tensor."""
    value, query = heads
    by_value = np.einsum("ajkl,hkl->ahj", residual, query, optimize=True)
    by_query = np.einsum("ajkl,haj->hkl", residual, value, optimize=True)
    return by_value.reshape(len(by_value), -1), by_query.reshape(-1)
