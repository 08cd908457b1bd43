"""Weighted sums over rows that determine every least-squares fit.

They add up: parts of the data, processes and machines each make their :class:`Moments`, and the
sum is that of all rows. Leaving rows out is a subtraction.

Sums are kept in the published basis, whose features ``S_jk q_l`` carry no sqrt(2), of tokens and
targets divided by powers of two: integer data are summed without rounding while the sums stay
below ``2 ** 53``, and the units of the data do not matter.
"""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from sklearn_mhla._backend import Array, Backend, NumpyBackend, backend_for
from sklearn_mhla._design import Block, Design
from sklearn_mhla._features import adjoint_block, n_cubic_features, n_pairs, pair_scale
from sklearn_mhla._gram import accumulate_gram, gram_diagonal, query_products, unpack_gram
from sklearn_mhla._tokens import (
    Rows,
    Sequences,
    check_sample_weights,
    check_sequences,
    check_targets,
    rows_of_positive_weight,
)

_FORMAT, _VERSION = "sklearn_mhla.Moments", 1
# Exponent of data that are all zero: below that of every number, so that any other replaces it.
_OF_ZEROS = -1100
_SUMS = ("gram", "products", "target_sum", "target_squares")
_EPS = float(np.finfo(np.float64).eps)
_ARRAYS = (*_SUMS, "target_shift")


@dataclass(eq=False, repr=False)
class Moments:
    r"""Second and first moments of cubic features and targets, as sums over weighted rows.

    A row is one prediction: a sequence for ``output="last"``, a token for ``output="sequence"``.
    With ``H`` the feature vector of a row (Yau et al. [1]_, Algorithm 2), ``y`` its target and
    ``w`` its weight, the object holds :math:`\sum w H H^T`, :math:`\sum w y H^T`,
    :math:`\sum w H`, :math:`\sum w y`, :math:`\sum w y^2` and :math:`\sum w`. Its size does
    not depend on the number of rows: about ``p ** 2 / 4`` numbers for ``p = d^2 (d + 1) / 2``
    features.

    Make one with :meth:`from_data` or :meth:`load`. ``a + b`` holds the rows of both, ``a - b`` those
    of ``a`` without those of ``b``, ``sum`` adds many; the order makes no difference beyond
    rounding.

    Attributes
    ----------
    n_rows : int
        Rows of positive weight.
    weight : float
        Sum of the weights; ``n_rows`` if none were given.
    token_dim : int
        Width ``d`` of the tokens.
    output : {"last", "sequence"}
        What a row is.
    causal : bool
        Whether a row of ``output="sequence"`` reads the state up to its token.
    state : {"sum", "mean"}
        Whether states are divided by their number of tokens.

    See Also
    --------
    MHLARegressor.partial_fit : The same as an estimator.

    References
    ----------
    .. [1] M. Yau, E. Akyurek, J. Mao, J. B. Tenenbaum, S. Jegelka and J. Andreas, "Learning
       Linear Attention in Polynomial Time", NeurIPS 2025, arXiv:2410.10101.

    Examples
    --------
    >>> from sklearn_mhla import Moments
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> X, y = make_linear_attention(n_samples=200, n_tokens=8, n_features=4, random_state=0)
    >>> first, second = Moments.from_data(X[:80], y[:80]), Moments.from_data(X[80:], y[80:])
    >>> total = first + second
    >>> total.n_rows, total.n_features
    (200, 40)
    >>> coef, intercept = total.solve()
    >>> coef.shape
    (1, 40)
    """

    # Sums are over rows in rescaled units: of tokens divided by 2 ** token_exponent and targets
    # divided by 2 ** target_exponent, then minus target_shift.
    gram: Array  # sum w s_a s_b q_l q_k for a <= b and l <= k: (P (P + 1) / 2, d (d + 1) / 2)
    products: Array  # sum w y H, then sum w H: (m + 1, p)
    target_sum: Array  # sum w y: (m,)
    target_squares: Array  # sum w y^2: (m,)
    target_shift: Array  # near the mean: (m,)
    weight: float
    n_rows: int
    token_dim: int
    token_exponent: int
    target_exponent: int
    output: str
    causal: bool
    state: str
    backend: Backend
    n_tokens: int | None = None
    device: str | None = None
    verbose: int = 0

    @classmethod
    def from_data(
        cls,
        X: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        n_tokens: int | None = None,
        output: str = "last",
        causal: bool = True,
        state: str = "sum",
        device: str | None = None,
        verbose: int = 0,
    ) -> Moments:
        """Sum over data.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens * d), (n_samples, n_tokens, d), or list of \
n_samples arrays of shape (n_tokens_i, d)
            Sequences in any form that :class:`MHLARegressor` accepts; arrays on disk are read
            block by block, twice.
        y : array-like, default=None
            Targets, in the form that :class:`MHLARegressor` accepts; None leaves the moments of
            the features alone.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence, not negative; integers act like repetitions.
        n_tokens : int, default=None
            How many tokens one row of a 2-D input holds; None means one.
        output : {"last", "sequence"}, default="last"
            One row per sequence, or one per token.
        causal : bool, default=True
            For ``output="sequence"``: whether position `t` reads the state of the first `t` tokens.
        state : {"sum", "mean"}, default="sum"
            Whether states are divided by their number of tokens.
        device : str, default=None
            "cpu", "cuda" or "cuda:<index>"; None computes where ``X`` is.
        verbose : int, default=0
            1 or more shows progress over blocks of sequences.

        Returns
        -------
        Moments

        Raises
        ------
        ValueError
            If the data or an option are invalid.
        MemoryError
            If the moments do not fit into memory.
        """
        if output not in ("last", "sequence") or state not in ("sum", "mean"):
            raise ValueError(
                "output must be 'last' or 'sequence' and state 'sum' or 'mean'; got "
                f"output={output!r} and state={state!r}."
            )
        sequences = check_sequences(X, n_tokens=n_tokens)
        rows = _rows_of(sequences, y, sample_weight, output)
        backend = backend_for(device, sequences.device)
        moments = cls.from_rows(
            rows, backend, output=output, causal=causal, state=state, verbose=bool(verbose)
        )
        return replace(moments, n_tokens=n_tokens, device=device, verbose=verbose)

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
        like: Moments | None = None,
    ) -> Moments:
        """Sum over validated rows; ``like`` supplies units in which the result is wanted.

        Data that are larger than its units allow get larger ones.
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

    @classmethod
    def from_design(
        cls,
        design: Design,
        targets: Array,
        weights: Array | None,
        *,
        target_exponent: int = 0,
        target_shift: Array | None = None,
    ) -> Moments:
        """Sum over all rows of a design.

        Parameters
        ----------
        design : Design
        targets : array of shape (rows, m)
            Divided by ``2 ** target_exponent``, then minus ``target_shift``.
        weights : array of shape (rows, 1) or None
            Positive.
        target_exponent : int
        target_shift : array of shape (m,), optional
            None stands for zero.

        Returns
        -------
        Moments
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
        return cls(
            gram,
            products,
            weighted.sum(0),
            (weighted * targets).sum(0),
            backend.zeros((targets.shape[1],)) if target_shift is None else target_shift,
            float(design.n_rows if weights is None else weights.sum()),
            design.n_rows,
            token_dim,
            design.exponent if design.sequences.largest else _OF_ZEROS,
            target_exponent,
            design.output,
            design.causal,
            design.state,
            backend,
        )

    def update(self, X: Any, y: Any = None, sample_weight: Any = None) -> Moments:
        """Add rows, in place.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that :meth:`from_data` accepts, of the same token width.
        y : array-like, default=None
            Targets, if the moments so far have some.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence, not negative.

        Returns
        -------
        Moments
            This object.

        Raises
        ------
        ValueError
            If the data do not fit those so far; nothing has been added then.
        """
        sequences = check_sequences(X, n_tokens=self.n_tokens, token_dim=self.token_dim)
        rows = _rows_of(sequences, y, sample_weight, self.output)
        if rows.targets.shape[1] != self.n_outputs:
            raise ValueError(
                f"y has {rows.targets.shape[1]} output(s), but these moments are of "
                f"{self.n_outputs}."
            )
        return self.add_rows(rows, backend_for(self.device, sequences.device))

    def add_rows(self, rows: Rows, backend: Backend) -> Moments:
        """Add validated rows in place; the sums move to ``backend``."""
        batch = self.from_rows(
            rows,
            backend,
            output=self.output,
            causal=self.causal,
            state=self.state,
            verbose=bool(self.verbose),
            like=self,
        )
        self._move_to(backend)
        return self._add(batch, 1)

    def merge(self, other: Moments) -> Moments:
        """The moments of the rows of both; the same as ``self + other``.

        Parameters
        ----------
        other : Moments
            Of tokens of the same width, as many outputs and the same options.

        Returns
        -------
        Moments
            A new object.

        Raises
        ------
        ValueError
            If the two are not of the same kind.
        """
        self._check_alike(other)
        return self._copy()._add(other, 1)

    def subtract(self, other: Moments) -> Moments:
        """The moments without the rows of ``other``; the same as ``self - other``.

        Parameters
        ----------
        other : Moments
            Of rows that are among those of this object. Rounding errors of the difference are
            relative to this object, not to what is left.

        Returns
        -------
        Moments
            A new object.

        Raises
        ------
        ValueError
            If the two are not of the same kind, or if ``other`` cannot be a part of this object
            because rows, weights or squares would become negative.
        """
        self._check_alike(other)
        if other.n_rows > self.n_rows or other.weight > self.weight * (1.0 + 1e-9):
            raise ValueError(
                f"Moments of {other.n_rows} rows of weight {other.weight:g} cannot be subtracted "
                f"from moments of {self.n_rows} rows of weight {self.weight:g}."
            )
        rest = self._copy()._add(other, -1)
        # Rounding may leave a little below zero, rows that were never added leave more.
        whole = gram_diagonal(self._in_units_of(rest).gram, self.token_dim)
        left = gram_diagonal(rest.gram, self.token_dim)
        if (left < -1e-9 * whole).any() or (rest.n_rows > 0 and not rest.weight > 0.0):
            raise ValueError(
                "The moments to subtract are not those of a part of these rows: a weight or a sum "
                "of squares would become negative."
            )
        if rest.n_rows == 0:
            rest.weight = 0.0
            for name in _SUMS:
                getattr(rest, name)[...] = 0.0
        return rest

    def __add__(self, other: Any) -> Moments:
        return self.merge(other) if isinstance(other, Moments) else NotImplemented

    def __radd__(self, other: Any) -> Moments:
        # The start of sum().
        return self._copy() if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: Any) -> Moments:
        return self.subtract(other) if isinstance(other, Moments) else NotImplemented

    def solve(
        self, alpha: float = 0.0, fit_intercept: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        r"""Ridge regression of the targets on the features.

        Minimises :math:`\sum w \| y - b - W \phi \|^2 + \alpha \| W \|_F^2`. The moments square
        the condition number of the features, and without the rows that cannot be corrected:
        expect errors of the condition number of the Gram matrix times 1e-16.

        Parameters
        ----------
        alpha : float, default=0.0
            Penalty, not negative; 0 gives the solution of minimum norm.
        fit_intercept : bool, default=False
            Whether there is a constant :math:`b`.

        Returns
        -------
        coef : ndarray of shape (m, p)
            As ``MHLARegressor.coef_``, packed isometrically.
        intercept : ndarray of shape (m,)
            Zero without ``fit_intercept``.

        Raises
        ------
        ValueError
            If there are no targets or no rows, or ``alpha`` is negative.
        """
        # The solvers are built on moments, this method on the solvers.
        from sklearn_mhla.solvers import MomentProblem, PrimalSolver, Units

        if not (math.isfinite(alpha) and alpha >= 0.0):
            raise ValueError(f"alpha must be finite and not negative; got {alpha}.")
        problem = MomentProblem(self, fit_intercept)
        units = Units(self.token_exponent, self.target_exponent)
        solution = PrimalSolver(problem).solve(units.alpha(alpha))
        coef = units.coef(self.backend.to_numpy(solution.coef))
        return coef, units.intercept(self.backend.to_numpy(solution.intercept))

    def save(self, path: Any) -> None:
        """Write to a file in NumPy's npz format, without pickling.

        Parameters
        ----------
        path : str or path-like
            File to write; no suffix is added.
        """
        known = {name: value for name, value in self.__getstate__().items() if value is not None}
        with open(path, "wb") as file:
            np.savez(file, format=_FORMAT, version=_VERSION, **known)

    @classmethod
    def load(cls, path: Any) -> Moments:
        """Read what :meth:`save` wrote, bit for bit.

        Parameters
        ----------
        path : str or path-like
            File to read. Nothing in it is executed.

        Returns
        -------
        Moments
            In the memory of the CPU.

        Raises
        ------
        ValueError
            If the file was not written by :meth:`save`, is damaged, or comes from a later version.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                content = {name: file[name] for name in file.files}
            if str(content.pop("format")) != _FORMAT:
                raise KeyError("format")
            version = int(content.pop("version"))
        except (AttributeError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as e:
            raise ValueError(f"{path} is not a file that Moments.save wrote, or damaged.") from e
        if version > _VERSION:
            raise ValueError(
                f"{path} has format version {version}; this version of sklearn_mhla reads up to "
                f"{_VERSION}. Update sklearn_mhla."
            )
        moments = cls.__new__(cls)
        try:
            moments.__setstate__(
                {name: value if value.ndim else value.item() for name, value in content.items()}
            )
            moments._check_shapes()
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return moments

    @property
    def n_features(self) -> int:
        """Number of features, ``p = d^2 (d + 1) / 2``."""
        return n_cubic_features(self.token_dim)

    @property
    def n_outputs(self) -> int:
        """Number of targets of a row, ``m``; 0 for moments of the features alone."""
        return len(self.products) - 1

    def second_moment(self) -> np.ndarray:
        r"""The published second moment, ``Lambda`` of the paper's Lemma 2.3.

        Returns
        -------
        ndarray of shape (p, p)
            :math:`\sum w H H^T / \sum w`, uncentred, without sqrt(2); both triangles.

        Raises
        ------
        ValueError
            If there are no rows or float64 cannot hold the result.
        """
        self._check_rows()
        lower = np.tril(self.backend.to_numpy(unpack_gram(self.gram, self.token_dim, self.backend)))
        lower /= self.weight
        with np.errstate(over="ignore"):
            lower = np.ldexp(lower, 6 * self.token_exponent)
        if not np.isfinite(lower).all():
            raise ValueError("The sixth power of the tokens overflows float64. Rescale the tokens.")
        lower += np.tril(lower, -1).T
        return lower

    # In the isometric basis and in rescaled units, for the solvers --------------------------

    @property
    def cross(self) -> Array:
        """``sum_i w_i y_i phi_i``, shape (m, p)."""
        return self.cross_matrix(None)

    @property
    def feature_sum(self) -> Array:
        """``sum_i w_i phi_i``, shape (p,)."""
        return self.products[-1] * self._scale()

    def mean(self) -> Array:
        """Weighted mean of the features, shape (1, p)."""
        return self.feature_sum[None] / self.weight

    def target_mean(self) -> Array:
        """Weighted mean of the targets, shape (m,)."""
        return self.target_shift + self.target_sum / self.weight

    def cross_matrix(self, mean: Array | None) -> Array:
        """``sum_i w_i y_i phi_i``, shape (m, p), of centred targets if ``mean`` is given."""
        shift = self.target_shift if mean is None else -self.target_sum / self.weight
        return (self.products[:-1] + shift[:, None] * self.products[-1]) * self._scale()

    def squares(self, centred: bool) -> Array:
        """``sum_i w_i y_i^2`` of every output, shape (m,)."""
        if centred:
            return self.target_squares - self.target_sum**2 / self.weight
        shift = self.target_shift
        return self.target_squares + shift * (2.0 * self.target_sum + self.weight * shift)

    def diagonal(self) -> Array:
        """``sum_i w_i phi_i^2`` of every feature, shape (p,)."""
        return gram_diagonal(self.gram, self.token_dim) * self.backend.asarray(
            np.repeat(_squared_scale(self.token_dim), self.token_dim)
        )

    def gram_matrix(self, mean: Array | None) -> Array:
        """The Gram matrix, shape (p, p), of features minus their ``mean`` if it is given.

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

    # Making, comparing, converting ------------------------------------------------------------

    def _check_alike(self, other: Moments) -> None:
        for name, what in (
            ("token_dim", "token width"),
            ("n_outputs", "number of outputs"),
            ("output", "output"),
            ("causal", "causal"),
            ("state", "state"),
        ):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs and (name != "causal" or self.output == "sequence"):
                raise ValueError(
                    f"These moments are of different kinds: {what} {ours!r} here, {theirs!r} in "
                    "the other. Make both with the same options."
                )

    def _check_rows(self) -> None:
        if self.n_rows == 0:
            raise ValueError("These moments hold no rows.")

    def _copy(self) -> Moments:
        return replace(self, **{name: getattr(self, name) + 0.0 for name in _ARRAYS})

    def _move_to(self, backend: Backend) -> None:
        if backend.name != self.backend.name:
            for name in _ARRAYS:
                array = self.backend.to_numpy(getattr(self, name))
                setattr(self, name, backend.asarray(array))
            self.backend = backend

    def _add(self, other: Moments, sign: int) -> Moments:
        """Add or subtract in place."""
        self._convert(
            max(self.token_exponent, other.token_exponent),
            max(self.target_exponent, other.target_exponent),
        )
        other = other._in_units_of(self)
        for name in _SUMS:
            total = getattr(self, name)
            if sign > 0:
                total += getattr(other, name)
            else:
                total -= getattr(other, name)
        self.weight += sign * other.weight
        self.n_rows += sign * other.n_rows
        return self

    def _in_units_of(self, other: Moments) -> Moments:
        """The same sums on the device, in the units and with the shift of others."""
        same = (
            self.backend.name == other.backend.name
            and self.token_exponent == other.token_exponent
            and self.target_exponent == other.target_exponent
            and bool((self.target_shift == other.target_shift).all())
        )
        if same:
            return self
        converted = self._copy()
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
            self.target_shift *= math.ldexp(1.0, targets)
            self.target_squares *= math.ldexp(1.0, 2 * targets)
        self.token_exponent, self.target_exponent = token_exponent, target_exponent

    def _shift_to(self, shift: Array) -> Moments:
        """Measure targets from another origin, in place."""
        moved = self.target_shift - shift
        self.products[:-1] += moved[:, None] * self.products[-1]
        self.target_squares += moved * (2.0 * self.target_sum + self.weight * moved)
        self.target_sum += self.weight * moved
        self.target_shift = shift + 0.0
        return self

    def _check_shapes(self) -> None:
        """Refuse arrays that do not belong together."""
        pairs, m = n_pairs(self.token_dim), self.n_outputs
        wanted = {
            "gram": (pairs * (pairs + 1) // 2, pairs),
            "products": (m + 1, self.n_features),
            "target_sum": (m,),
            "target_squares": (m,),
            "target_shift": (m,),
        }
        for name, shape in wanted.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != np.float64:
                raise ValueError(
                    f"{name} has shape {array.shape} and type {array.dtype}, not {shape} and "
                    "float64"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Fields as NumPy arrays and plain values; they are loaded into the CPU's memory."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        del state["backend"]
        for name in _ARRAYS:
            state[name] = self.backend.to_numpy(state[name])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, backend=NumpyBackend())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(n_rows={self.n_rows}, weight={self.weight:g}, "
            f"token_dim={self.token_dim}, n_outputs={self.n_outputs})"
        )


def _rows_of(sequences: Sequences, y: Any, sample_weight: Any, output: str) -> Rows:
    """Rows of positive weight, with targets of no columns where there are none."""
    if y is None:
        n_rows = int(sequences.lengths.sum()) if output == "sequence" else len(sequences)
        targets = np.zeros((n_rows, 0))
    else:
        targets, _ = check_targets(y, sequences, output, "Moments")
    weights = check_sample_weights(sample_weight, len(sequences))
    return rows_of_positive_weight(sequences, targets, weights, output)


def _exponent(values: np.ndarray) -> int:
    """Power of two that brings the largest value into [0.5, 1)."""
    largest = float(np.abs(values).max(initial=0.0))
    return math.frexp(largest)[1] if largest else _OF_ZEROS


def _round_mean(targets: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Column means rounded to a multiple of a power of two near the standard deviation.

    Such a shift is enough against cancellation, as the rows that it comes from stay among those
    that are summed, and it keeps integers integer.
    """
    mean = np.average(targets, axis=0, weights=weights)
    deviation = np.average((targets - mean) ** 2, axis=0, weights=weights) ** 0.5
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
