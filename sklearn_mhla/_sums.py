"""Sums over weighted rows, their units, and the matrices that solvers read off them.

Sums are kept in the published basis, whose features ``H = S_jk q_l`` carry no sqrt(2), of tokens
and targets divided by powers of two: integer data are summed without rounding while the sums stay
below ``2 ** 53``, and the units of the data do not matter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Self

import numpy as np

from sklearn_mhla._backend import Array, Backend, NumpyBackend
from sklearn_mhla._design import Block, Design
from sklearn_mhla._features import adjoint_block, n_cubic_features, n_pairs, pair_scale
from sklearn_mhla._gram import (
    accumulate_gram,
    gram_bounds,
    gram_diagonal,
    query_products,
    unpack_gram,
)
from sklearn_mhla._tokens import Rows

# Exponent of data that are all zero: below that of every number, so that any other replaces it.
_OF_ZEROS = -1100
_EPS = float(np.finfo(np.float64).eps)
SUMS = ("gram", "products", "target_sum", "target_squares")
ARRAYS = (*SUMS, "target_shift")


class Sums:
    """Second and first moments of features and targets.

    Tokens are divided by ``2 ** token_exponent``, targets by ``2 ** target_exponent`` and then
    reduced by ``target_shift``, which lies near their mean.

    Attributes
    ----------
    gram : array of shape (P (P + 1) / 2, d (d + 1) / 2)
        ``sum_i w_i s_a s_b q_l q_k`` for ``a <= b`` and ``l <= k``; ``P = d (d + 1) / 2``.
    products : array of shape (m + 1, p)
        ``sum_i w_i y_i H_i``, and last ``sum_i w_i H_i``.
    target_sum, target_squares : array of shape (m,)
        ``sum_i w_i y_i`` and ``sum_i w_i y_i^2``.
    target_shift : array of shape (m,)
    weight : float
        ``sum_i w_i``.
    n_rows : int
    longest : int or None
        Tokens of the longest sequence; None after a subtraction, of which less can be proved.
    token_dim, token_exponent, target_exponent : int
    output, causal, state
        Of the design.
    backend : Backend
    """

    gram: Array
    products: Array
    target_sum: Array
    target_squares: Array
    target_shift: Array
    weight: float
    n_rows: int
    longest: int | None
    token_dim: int
    token_exponent: int
    target_exponent: int
    output: str
    causal: bool
    state: str
    backend: Backend

    @classmethod
    def _make(cls, **values: Any) -> Self:
        made = cls.__new__(cls)
        vars(made).update(values)
        return made

    @classmethod
    def from_design(
        cls,
        design: Design,
        targets: Array,
        weights: Array | None,
        *,
        target_exponent: int = 0,
        target_shift: Array | None = None,
    ) -> Self:
        """Sum over all rows of a design.

        Parameters
        ----------
        design : Design
            The rows, in rescaled tokens.
        targets : array of shape (rows, m)
            Divided by ``2 ** target_exponent``, then minus ``target_shift``.
        weights : array of shape (rows, 1) or None
            Positive.
        target_exponent : int
            Power of two by which the targets were divided.
        target_shift : array of shape (m,), optional
            What the targets were reduced by; None stands for zero.

        Returns
        -------
        Moments
            Of all rows, on the device of the design.
        """
        backend, token_dim = design.backend, design.token_dim
        pairs = n_pairs(token_dim)
        gram = backend.zeros((pairs * (pairs + 1) // 2, pairs))
        # The sums ride along as one more output whose target is 1.
        products = backend.zeros((targets.shape[1] + 1, design.n_features))
        for block in design.blocks("moments", isometric=False):
            weight = None if weights is None else block.gather(weights)
            accumulate_gram(gram, block.state, query_products(block, weight), backend)
            products += adjoint_block(block.state, block.query, _dual(block, targets, weight))
        weighted = targets if weights is None else targets * weights
        n_outputs = targets.shape[1]
        return cls._make(
            gram=gram,
            products=products,
            target_sum=weighted.sum(0),
            target_squares=(weighted * targets).sum(0),
            target_shift=backend.zeros((n_outputs,)) if target_shift is None else target_shift,
            weight=float(design.n_rows if weights is None else weights.sum()),
            n_rows=design.n_rows,
            longest=int(design.sequences.lengths.max()),
            token_dim=token_dim,
            token_exponent=design.exponent if design.sequences.largest else _OF_ZEROS,
            target_exponent=target_exponent,
            output=design.output,
            causal=design.causal,
            state=design.state,
            backend=backend,
        )

    @classmethod
    def from_rows(
        cls,
        rows: Rows,
        backend: Backend,
        *,
        output: str = "last",
        causal: bool = True,
        state: str = "sum",
        verbose: bool = False,
        like: Sums | None = None,
    ) -> Self:
        """Sum over validated rows.

        Parameters
        ----------
        rows : Rows
            Sequences, targets and weights.
        backend : Backend
            Where to compute.
        output : {"last", "sequence"}
            What a row is.
        causal : bool
            Whether a row of ``output="sequence"`` reads the state up to its token.
        state : {"sum", "mean"}
            Whether states are divided by their number of tokens.
        verbose : bool
            Show a progress bar.
        like : Moments, optional
            Supplies the units and the shift, so that adding takes no conversion; data that are
            too large for its units get larger ones.

        Returns
        -------
        Moments
            Of all rows, on the device of ``backend``.

        Raises
        ------
        MemoryError
            If the moments do not fit.
        """
        sequences = rows.sequences
        needed = 2 * n_cubic_features(sequences.token_dim) ** 2
        if needed > backend.available_memory():
            raise MemoryError(
                f"The moments of tokens of width {sequences.token_dim} need {needed / 1e9:.3g} GB, "
                f"but only {backend.available_memory() / 1e9:.3g} GB are available. Reduce the "
                "width of the tokens."
            )
        exponent = _exponent(rows.targets)
        if like is not None:
            exponent = max(exponent, like.target_exponent)
            # The largest value decides on the units of a design.
            largest = max(sequences.largest, math.ldexp(0.5, like.token_exponent))
            sequences = replace(sequences, largest=largest)
        design = Design(
            sequences, backend, output=output, causal=causal, state=state, verbose=verbose
        )
        targets = np.ldexp(rows.targets, -exponent)
        if like is None:
            shift = _round_mean(targets, rows.weights)
        else:
            shift = np.ldexp(backend.to_numpy(like.target_shift), like.target_exponent - exponent)
        return cls.from_design(
            design,
            backend.asarray(targets - shift),
            None if rows.weights is None else backend.asarray(rows.weights)[:, None],
            target_exponent=exponent,
            target_shift=backend.asarray(shift),
        )

    def add_rows(self, rows: Rows, backend: Backend, verbose: bool = False) -> Self:
        """Add validated rows, in place.

        Parameters
        ----------
        rows : Rows
            With tokens and targets of the right widths.
        backend : Backend
            Where to compute; the sums move there.
        verbose : bool
            Show a progress bar.

        Returns
        -------
        Moments
            This object.
        """
        batch = self.from_rows(
            rows,
            backend,
            output=self.output,
            causal=self.causal,
            state=self.state,
            verbose=verbose,
            like=self,
        )
        self._move_to(backend)
        return self._add(batch, 1)

    @property
    def n_features(self) -> int:
        """Number of features, ``p = d^2 (d + 1) / 2``."""
        return n_cubic_features(self.token_dim)

    @property
    def n_outputs(self) -> int:
        """Number of targets of a row, ``m``; 0 for moments of the features alone."""
        return len(self.products) - 1

    @property
    def cross(self) -> Array:
        """``sum_i w_i y_i phi_i``, shape (m, p)."""
        return self.cross_matrix(None)

    @property
    def feature_sum(self) -> Array:
        """``sum_i w_i phi_i``, shape (p,)."""
        return self.products[-1] * self._scale()

    def mean(self) -> Array:
        """Weighted mean of the features.

        Returns
        -------
        array of shape (1, p)
            Isometric, in rescaled units.
        """
        return self.feature_sum[None] / self.weight

    def target_mean(self) -> Array:
        """Weighted mean of the targets.

        Returns
        -------
        array of shape (m,)
            In rescaled units.
        """
        return self.target_shift + self.target_sum / self.weight

    def cross_matrix(self, mean: Array | None) -> Array:
        """Sums of targets times features, ``sum_i w_i y_i phi_i``.

        Parameters
        ----------
        mean : array of shape (1, p) or None
            Mean of the features where an intercept is fitted.

        Returns
        -------
        array of shape (m, p)
            Of centred targets if ``mean`` is given; then it does not matter whether features are.
        """
        shift = self.target_shift if mean is None else -self.target_sum / self.weight
        return (self.products[:-1] + shift[:, None] * self.products[-1]) * self._scale()

    def squares(self, centred: bool) -> Array:
        """Sums of squared targets, ``sum_i w_i y_i^2``.

        Parameters
        ----------
        centred : bool
            Whether targets are taken minus their mean.

        Returns
        -------
        array of shape (m,)
            One per output.
        """
        if centred:
            return self.target_squares - self.target_sum**2 / self.weight
        shift = self.target_shift
        return self.target_squares + shift * (2.0 * self.target_sum + self.weight * shift)

    def diagonal(self) -> Array:
        """Sums of squared features, ``sum_i w_i phi_i^2``.

        Returns
        -------
        array of shape (p,)
            The diagonal of the Gram matrix.
        """
        return gram_diagonal(self.gram, self.token_dim) * self.backend.asarray(
            np.repeat(_squared_scale(self.token_dim), self.token_dim)
        )

    def bounds(self) -> Array:
        """Upper bounds of the diagonal, to which rounding errors are relative.

        Returns
        -------
        array of shape (p,)
            ``sum_i w_i S_jj S_kk q_l^2`` for the feature ``S_jk q_l``, twice that for ``j < k``.
        """
        return gram_bounds(self.gram, self.token_dim) * self.backend.asarray(
            np.repeat(_squared_scale(self.token_dim), self.token_dim)
        )

    def gram_matrix(self, mean: Array | None) -> Array:
        """Gram matrix of the features, or of features minus their mean.

        Parameters
        ----------
        mean : array of shape (1, p) or None
            Mean of the features where an intercept is fitted.

        Returns
        -------
        array of shape (p, p)
            Only the lower triangle is meaningful.
        """
        squared_scale = _squared_scale(self.token_dim)
        full = unpack_gram(self.gram, self.token_dim, self.backend, squared_scale)
        if mean is not None:
            size = full.shape[0]
            step = max(1, 2**20 // size)
            for start in range(0, size, step):
                rows = slice(start, start + step)
                full[rows] -= (self.weight * mean[:, rows].mT) * mean
        return full

    def _scale(self) -> Array:
        """Published features times this are isometric."""
        return self.backend.asarray(np.repeat(pair_scale(self.token_dim), self.token_dim))

    # Units and places --------------------------------------------------------------------------

    def copy(self) -> Self:
        """The same sums in memory of their own.

        Returns
        -------
        Moments
            Not affected by what is added to this object.
        """
        return self._make(**vars(self) | {name: getattr(self, name) + 0.0 for name in ARRAYS})

    def _move_to(self, backend: Backend) -> None:
        if backend.name != self.backend.name:
            for name in ARRAYS:
                array = self.backend.to_numpy(getattr(self, name))
                setattr(self, name, backend.asarray(array))
            self.backend = backend

    def _add(self, other: Sums, sign: int) -> Self:
        """Add or subtract in place."""
        self._convert(
            max(self.token_exponent, other.token_exponent),
            max(self.target_exponent, other.target_exponent),
        )
        other = other._in_units_of(self)
        for name in SUMS:
            total = getattr(self, name)
            if sign > 0:
                total += getattr(other, name)
            else:
                total -= getattr(other, name)
        self.weight += sign * other.weight
        self.n_rows += sign * other.n_rows
        if sign < 0 or self.longest is None or other.longest is None:
            self.longest = None
        else:
            self.longest = max(self.longest, other.longest)
        return self

    def _in_units_of(self, other: Sums) -> Self:
        """The same sums on the device, in the units and with the shift of others."""
        same = (
            self.backend.name == other.backend.name
            and self.token_exponent == other.token_exponent
            and self.target_exponent == other.target_exponent
            and bool((self.target_shift == other.target_shift).all())
        )
        if same:
            return self
        converted = self.copy()
        converted._move_to(other.backend)
        converted._convert(other.token_exponent, other.target_exponent)
        return converted._shift_to(other.target_shift)

    def _convert(self, token_exponent: int, target_exponent: int) -> None:
        """Divide tokens and targets by larger powers of two, in place."""
        tokens = self.token_exponent - token_exponent
        targets = self.target_exponent - target_exponent
        if tokens:
            self.gram *= math.ldexp(1.0, 6 * tokens)
            self.products *= math.ldexp(1.0, 3 * tokens)
        if targets:
            self.products[:-1] *= math.ldexp(1.0, targets)
            self.target_sum *= math.ldexp(1.0, targets)
            self.target_shift = self.target_shift * math.ldexp(1.0, targets)  # may be shared
            self.target_squares *= math.ldexp(1.0, 2 * targets)
        self.token_exponent, self.target_exponent = token_exponent, target_exponent

    def _shift_to(self, shift: Array) -> Self:
        """Measure targets from another origin, in place."""
        moved = self.target_shift - shift
        self.products[:-1] += moved[:, None] * self.products[-1]
        self.target_squares += moved * (2.0 * self.target_sum + self.weight * moved)
        self.target_sum += self.weight * moved
        self.target_shift = shift
        return self

    def __sizeof__(self) -> int:
        """Bytes with those of the arrays, by which Dask decides what to move where."""
        return super().__sizeof__() + sum(int(getattr(self, name).nbytes) for name in ARRAYS)

    def __getstate__(self) -> dict[str, Any]:
        """Fields as NumPy arrays and plain values; they are loaded into the CPU's memory."""
        state = {name: value for name, value in vars(self).items() if name != "backend"}
        for name in ARRAYS:
            state[name] = self.backend.to_numpy(state[name])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, backend=NumpyBackend())


def _exponent(values: np.ndarray) -> int:
    """Power of two that brings the largest value into [0.5, 1)."""
    largest = float(np.abs(values).max(initial=0.0))
    return math.frexp(largest)[1] if largest else _OF_ZEROS


def _round_mean(targets: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Column means rounded to a multiple of a power of two near the standard deviation.

    Such a shift is enough against cancellation, as the rows that it comes from stay among those
    that are summed, and it keeps integers integer.
    """
    part = 1.0 / len(targets) if weights is None else (weights / weights.sum())[:, None]
    mean = (part * targets).sum(0)
    deviation = (part * (targets - mean) ** 2).sum(0) ** 0.5
    grid = np.ldexp(1.0, np.frexp(np.maximum(deviation, _EPS * np.abs(mean)))[1])
    rounded: np.ndarray = np.rint(mean / grid) * grid
    return rounded


def _squared_scale(token_dim: int) -> np.ndarray:
    """1 for squares of state entries on the diagonal, exactly 2 off it."""
    return np.where(pair_scale(token_dim) > 1.0, 2.0, 1.0)


def _dual(block: Block, targets: Array, weight: Array | None) -> Array:
    """Weighted targets of a block with a column of ones appended: (K, R, m + 1)."""
    placed = block.gather(targets)
    extended = block.backend.empty((*placed.shape[:2], placed.shape[2] + 1))
    extended[..., :-1] = placed
    extended[..., -1] = 1.0  # absent queries are zero, so their one counts for nothing
    if weight is not None:
        extended *= weight
    return extended
