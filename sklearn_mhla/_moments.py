"""Weighted sums over rows that determine every least-squares fit, as an object of their own.

They add up: parts of the data, processes and machines each make their :class:`Moments`, and the
sum is that of all rows. Leaving rows out is a subtraction.
"""

from __future__ import annotations

import math
import zipfile
from typing import Any

import numpy as np

from sklearn_mhla._backend import backend_for, is_dask
from sklearn_mhla._features import n_pairs
from sklearn_mhla._gram import gram_diagonal, unpack_gram
from sklearn_mhla._sums import SUMS, Sums
from sklearn_mhla._targets import check_sample_weights, check_targets
from sklearn_mhla._tokens import (
    Rows,
    Sequences,
    check_sequences,
    rows_of_positive_weight,
)
from sklearn_mhla.solvers import MomentProblem, PrimalSolver, Units

_FORMAT, _VERSION = "sklearn_mhla.Moments", 1


class Moments(Sums):
    r"""Second and first moments of cubic features and targets, as sums over weighted rows.

    A row is one prediction: a sequence for ``output="last"``, a token for ``output="sequence"``.
    With ``H`` the feature vector of a row (Yau et al. [1]_, Algorithm 2), ``y`` its target and
    ``w`` its weight, the object holds :math:`\sum w H H^T`, :math:`\sum w y H^T`,
    :math:`\sum w H`, :math:`\sum w y`, :math:`\sum w y^2` and :math:`\sum w`. Its size does
    not depend on the number of rows: about ``p ** 2 / 4`` numbers for ``p = d^2 (d + 1) / 2``
    features.

    Make one with :meth:`from_data` or :meth:`load`. ``a + b`` holds the rows of both, ``a - b``
    those of ``a`` without those of ``b``, ``sum`` adds many; the order makes no difference
    beyond rounding.

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

    n_tokens: int | None = None
    device: str | None = None
    verbose: int = 0

    def __init__(self) -> None:
        raise TypeError("Make moments with Moments.from_data(X, y) or Moments.load(path).")

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
        check_options(output, state)
        if is_dask(X):
            from sklearn_mhla import distributed

            return distributed.moments(
                X,
                y,
                sample_weight=sample_weight,
                n_tokens=n_tokens,
                output=output,
                causal=causal,
                state=state,
                device=device,
            )
        sequences = check_sequences(X, n_tokens=n_tokens)
        rows = rows_of(sequences, y, sample_weight, output)
        backend = backend_for(device, sequences.device)
        moments = cls.from_rows(
            rows, backend, output=output, causal=causal, state=state, verbose=bool(verbose)
        )
        moments.n_tokens, moments.device, moments.verbose = n_tokens, device, verbose
        return moments

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
        if is_dask(X):
            names = ("n_tokens", "output", "causal", "state", "device")
            options = {name: getattr(self, name) for name in names}
            batch = self.from_data(X, y, sample_weight=sample_weight, **options)
            self._check_alike(batch)
            return self._add(batch, 1)
        sequences = check_sequences(X, n_tokens=self.n_tokens, token_dim=self.token_dim)
        rows = rows_of(sequences, y, sample_weight, self.output)
        if rows.targets.shape[1] != self.n_outputs:
            raise ValueError(
                f"y has {rows.targets.shape[1]} output(s), but these moments are of "
                f"{self.n_outputs}."
            )
        backend = backend_for(self.device, sequences.device)
        return self.add_rows(rows, backend, bool(self.verbose))

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
        return self.copy()._add(other, 1)

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
        rest = self.copy()._add(other, -1)
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
            for name in SUMS:
                getattr(rest, name)[...] = 0.0
        return rest

    def __add__(self, other: Any) -> Moments:
        return self.merge(other) if isinstance(other, Moments) else NotImplemented

    def __radd__(self, other: Any) -> Moments:
        # The start of sum().
        return self.copy() if isinstance(other, int) and other == 0 else NotImplemented

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

        Warns
        -----
        LinAlgWarning
            If the moments determine the coefficients to fewer than four digits.
        """
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
            with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
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
        moments = cls._make()
        missing = set(Sums.__annotations__) - {"backend"} - set(content)
        if missing:
            raise ValueError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}.")
        try:
            moments.__setstate__(
                {name: value if value.ndim else value.item() for name, value in content.items()}
            )
            moments._check_shapes()
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return moments

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
        lower = self.backend.to_numpy(unpack_gram(self.gram, self.token_dim, self.backend))
        moment = np.tril(lower)
        moment /= self.weight
        with np.errstate(over="ignore"):
            np.ldexp(moment, 6 * self.token_exponent, out=moment)
        if not np.isfinite(moment).all():
            raise ValueError("The sixth power of the tokens overflows float64. Rescale the tokens.")
        moment += np.tril(moment, -1).T
        return moment

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

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(n_rows={self.n_rows}, weight={self.weight:g}, "
            f"token_dim={self.token_dim}, n_outputs={self.n_outputs})"
        )


def check_options(output: str, state: str) -> None:
    """Refuse what is not an option."""
    if output not in ("last", "sequence") or state not in ("sum", "mean"):
        raise ValueError(
            "output must be 'last' or 'sequence' and state 'sum' or 'mean'; got "
            f"output={output!r} and state={state!r}."
        )


def rows_of(sequences: Sequences, y: Any, sample_weight: Any, output: str) -> Rows:
    """Rows of positive weight, with targets of no columns where there are none."""
    if y is None:
        n_rows = int(sequences.lengths.sum()) if output == "sequence" else len(sequences)
        targets = np.zeros((n_rows, 0))
    else:
        targets, _ = check_targets(y, sequences, output, "Moments")
    weights = check_sample_weights(sample_weight, len(sequences))
    return rows_of_positive_weight(sequences, targets, weights, output)
