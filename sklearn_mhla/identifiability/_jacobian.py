r"""Local identifiability of a model with few heads: the ranks of two Jacobians.

Predictions are linear in the coefficients ``p(Theta)`` of the function, so their Jacobians with
respect to the heads ``Theta = (V, Q)`` satisfy ``J_data = Phi J_p``. If ``Phi`` is injective on the
range ``T`` of ``J_p`` (the tangent space of the functions with ``H`` heads), that is if
``rank J_data = rank J_p``, and if ``rank J_p`` has its generic value, then the functions near
``p(Theta)`` form a manifold with tangent space ``T`` on which ``Phi`` is an immersion: no model
nearby agrees with ``Theta`` on all rows and computes another function.

**How the ranks are found.** ``T`` depends on the span of the ``V_h`` and on that of the ``Q_h``
alone, so both are replaced by orthonormal bases; then ``J_p`` is well conditioned on its range
whatever the sizes of the heads. Its eigenvectors and singular values give an orthonormal basis
``E = J_p B`` of ``T``, and what decides are the singular values of ``Phi E``, which depend on no
parametrisation. They come from ``B^T J_data^T J_data B``, accumulated over blocks of rows. That
matrix squares them, so the small ones are only good to 1e-8 of the largest; the directions found
are therefore sent through the Jacobians once more, and their images measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.linalg import eigh, qr, svd
from sklearn.utils import check_random_state

from sklearn_mhla._design import Design
from sklearn_mhla._heads import Heads, tensor_to_coef
from sklearn_mhla.identifiability._standardized import StandardizedDesign
from sklearn_mhla.solvers import LeastSquaresProblem
from sklearn_mhla.solvers._head_equations import (
    CoefficientEquations,
    RowEquations,
    directional_derivatives,
)

# Squared singular values below this part of the largest are measured again.
_COARSE = 1e-8
# Heads whose singular values are this much smaller than the largest are no heads.
_NO_HEAD = 1e-10


@dataclass(frozen=True)
class LocalIdentifiability:
    """What the Jacobians say at one pair ``(V, Q)``.

    Attributes
    ----------
    rank_data : int
        Rank of the Jacobian of the predictions on all rows.
    rank_function : int
        Rank of the Jacobian of the coefficients of the function.
    rank_generic : int
        ``rank_function`` at random heads.
    n_parameters : int
        Number of entries of all heads, ``H (m d + d^2)``.
    singular_value : float
        The smallest singular value of the features on the tangent space of the functions,
        relative to the largest: how far from not being identifiable.
    heads : Heads
        Where the test was made: the model given, its heads orthogonalised and balanced, or
        random heads.
    directions : Heads
        Changes ``(dV, dQ)`` of ``heads`` that change the function and, to first order, no
        prediction: ``value`` (k, H, m, d), ``key_query`` (k, H, d, d).
    generic : bool
        Whether the test was made at random heads, and so speaks of almost all models.
    """

    rank_data: int
    rank_function: int
    rank_generic: int
    n_parameters: int
    singular_value: float
    heads: Heads
    directions: Heads
    generic: bool

    @property
    def is_regular(self) -> bool:
        """Whether the functions near this model form a manifold, so that the test can say yes."""
        return self.rank_function == self.rank_generic

    def __bool__(self) -> bool:
        return self.is_regular and self.rank_data == self.rank_function

    def __repr__(self) -> str:
        n_heads = len(self.heads.value)
        where = f"almost all models of {n_heads} heads" if self.generic else f"{n_heads} heads"
        if not self.is_regular:
            verdict = f"undecided: a singular point (generic rank {self.rank_generic})"
        else:
            verdict = "locally identifiable" if self else "not locally identifiable"
        return (
            f"<{where}: {verdict}; rank {self.rank_data} of {self.rank_function}, "
            f"smallest relative singular value {self.singular_value:.1e}>"
        )


def local_identifiability(
    design: Design,
    heads: Heads | None = None,
    *,
    n_heads: int | None = None,
    n_outputs: int | None = None,
    tol: float = 1e-9,
    n_draws: int = 3,
    random_state: Any = None,
) -> LocalIdentifiability:
    r"""Whether a model can move without the rows noticing, to first order.

    Parameters
    ----------
    design : Design
        Rows of weight zero left out.
    heads : Heads, optional
        A model of the user's tokens. Without it the test is made at random heads of the given
        numbers: the ranks there are those of all models but a set of measure zero.
    n_heads, n_outputs : int, optional
        ``H`` and ``m`` where no heads are given.
    tol : float
        Singular values below ``tol`` times the largest are zero.
    n_draws : int
        Random heads tried until one has full rank. One is enough with probability one.
    random_state : int, RandomState or None

    Returns
    -------
    LocalIdentifiability
        True where the model is locally identifiable.

    Notes
    -----
    With ``N = H (m d + d^2)`` unknowns: memory for about five ``N x N`` matrices and
    ``m H^2 d^3`` numbers; ``rows (H^2 d^4 / 4 + m H^2 d^3)`` multiplications for the accumulation
    and about ``15 N^3`` for the eigendecompositions (``25 N^3`` where heads are given). Where most
    directions are null, up to ``2 rows m N^2`` more. Nothing of size ``rows x p`` or ``p x p`` is
    formed.
    """
    random = check_random_state(random_state)
    standard = StandardizedDesign(design)
    if heads is not None:
        found = tangent_test(standard, standard.from_user(heads), tol, random)
        return _in_user_units(found, standard)
    if n_heads is None or n_outputs is None:
        raise ValueError(
            f"Without heads, n_heads and n_outputs are needed; got n_heads={n_heads}, "
            f"n_outputs={n_outputs}."
        )
    for _ in range(n_draws):
        drawn = random_heads(n_heads, n_outputs, design.token_dim, random)
        result = tangent_test(standard, drawn, tol, None)
        if result:
            break
    return _in_user_units(result, standard)


def tangent_test(
    standard: StandardizedDesign, heads: Heads, tol: float, random: np.random.RandomState | None
) -> LocalIdentifiability:
    """The test in standardised units; ``random`` draws the heads that tell the generic rank.

    None says that ``heads`` are themselves drawn at random.
    """
    n_heads, n_outputs, d = heads.value.shape
    bases, sizes = orthonormal_heads(heads)
    basis = _tangent_basis(bases, tol)
    rank_function = basis.shape[1]
    if random is None:
        rank_generic = rank_function
    else:
        drawn = orthonormal_heads(random_heads(n_heads, n_outputs, d, random))[0]
        rank_generic = _tangent_basis(drawn, tol).shape[1]

    problem = LeastSquaresProblem(
        standard, standard.backend.zeros((standard.n_rows, n_outputs)), None, False
    )
    matrix = basis.T @ RowEquations(problem, 0.0).equations(bases).matrix() @ basis

    def squares(vectors: np.ndarray) -> np.ndarray:
        directions = _as_directions((basis @ vectors).T, bases)
        total = np.zeros((vectors.shape[1],) * 2)
        for block in standard.blocks():
            image = directional_derivatives(block, bases, directions)
            image = image.reshape(-1, image.shape[-1])
            total += standard.backend.to_numpy(image.mT @ image)
        return total

    singular, vectors = _singular_values(matrix, squares)
    largest = singular.max(initial=0.0)
    null = singular <= tol * largest
    directions = _as_directions((basis @ vectors[:, null]).T, bases)
    # A direction at the bases is one at the balanced heads, V and Q being sqrt(sizes) longer.
    root = np.sqrt(sizes)[:, None, None]
    return LocalIdentifiability(
        rank_data=int((~null).sum()),
        rank_function=rank_function,
        rank_generic=rank_generic,
        n_parameters=n_heads * d * (n_outputs + d),
        singular_value=float(singular.min(initial=largest) / largest) if largest > 0.0 else 0.0,
        heads=Heads(bases.value * root, bases.key_query * root),
        directions=Heads(directions.value / root, directions.key_query / root),
        generic=random is None,
    )


def random_heads(
    n_heads: int, n_outputs: int, token_dim: int, random: np.random.RandomState
) -> Heads:
    """Heads with independent normal entries."""
    return Heads(
        random.standard_normal((n_heads, n_outputs, token_dim)),
        random.standard_normal((n_heads, token_dim, token_dim)),
    )


def orthonormal_heads(heads: Heads) -> tuple[Heads, np.ndarray]:
    """Orthonormal ``vec(V_h)`` and ``vec(Q_h)`` and sizes (H,) of the same coefficient tensor.

    There are fewer heads where the given ones depend linearly on each other.
    """
    n_heads, n_outputs, d = heads.value.shape
    left, left_factor = qr(heads.value.reshape(n_heads, -1).T, mode="economic")
    right, right_factor = qr(heads.key_query.reshape(n_heads, -1).T, mode="economic")
    inner, sizes, outer = svd(left_factor @ right_factor.T, full_matrices=False)
    kept = sizes > _NO_HEAD * sizes.max(initial=0.0)
    value, key_query = (left @ inner[:, kept]).T, outer[kept] @ right.T
    return Heads(value.reshape(-1, n_outputs, d), key_query.reshape(-1, d, d)), sizes[kept]


def _tangent_basis(bases: Heads, tol: float) -> np.ndarray:
    """``B`` with ``(J_p B)^T J_p B = I`` and range that of ``J_p^T``, at orthonormal heads."""
    n_outputs, d = bases.value.shape[1:]
    equations = CoefficientEquations(np.zeros((n_outputs, d, d, d))).equations(bases)

    def squares(vectors: np.ndarray) -> np.ndarray:
        value, key_query = _as_directions(vectors.T, bases)
        tensor = np.einsum("nhaj,hkl->najkl", value, bases.key_query, optimize=True)
        tensor += np.einsum("haj,nhkl->najkl", bases.value, key_query, optimize=True)
        image = tensor_to_coef(tensor.reshape(-1, d, d, d)).reshape(len(tensor), -1)
        product: np.ndarray = image @ image.T
        return product

    singular, vectors = _singular_values(equations.matrix(), squares)
    kept = singular > tol * singular.max(initial=0.0)
    basis: np.ndarray = vectors[:, kept] / singular[kept]
    return basis


def _singular_values(
    matrix: np.ndarray, squares: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Singular values (n,) and right singular vectors (n, n) of ``J``.

    ``matrix`` is ``J^T J``; ``squares`` maps vectors ``X`` (n, k) to ``(J X)^T J X``. On the span
    of the smallest eigenvectors that product is free of the rounding errors that the large ones
    leave in ``J^T J``.
    """
    eigenvalues, vectors = eigh(matrix, check_finite=False)
    small = eigenvalues <= _COARSE * eigenvalues.max(initial=0.0)
    if small.any():
        eigenvalues[small], rotation = eigh(squares(vectors[:, small]), check_finite=False)
        vectors[:, small] = vectors[:, small] @ rotation
    return np.sqrt(np.maximum(eigenvalues, 0.0)), vectors


def _as_directions(vectors: np.ndarray, heads: Heads) -> Heads:
    """Rows ``(dV (m, H d), dQ (H d^2))`` in the layout of the heads, with a leading axis."""
    n_heads, n_outputs, d = heads.value.shape
    split = n_outputs * n_heads * d
    value = vectors[:, :split].reshape(-1, n_outputs, n_heads, d).swapaxes(1, 2)
    return Heads(value, vectors[:, split:].reshape(-1, n_heads, d, d))


def _in_user_units(
    result: LocalIdentifiability, standard: StandardizedDesign
) -> LocalIdentifiability:
    return replace(
        result,
        heads=standard.to_user(result.heads),
        directions=standard.to_user(result.directions),
    )
