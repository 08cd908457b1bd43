"""The certificate: what a set of inputs determines about a linear-attention model."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from sklearn.utils.validation import check_scalar

from sklearn_mhla._backend import backend_for
from sklearn_mhla._design import Design
from sklearn_mhla._heads import Heads
from sklearn_mhla._span import Span
from sklearn_mhla._targets import check_targets
from sklearn_mhla._tokens import (
    Sequences,
    check_sequences,
    rows_of_positive_weight,
)
from sklearn_mhla.identifiability._error_bound import error_bound
from sklearn_mhla.identifiability._jacobian import LocalIdentifiability, local_identifiability
from sklearn_mhla.identifiability._null_space import NullSpace
from sklearn_mhla.identifiability._spectrum import MomentSpectrum, SpanSpectrum
from sklearn_mhla.identifiability._verdict import (
    IDENTIFIABLE,
    Model,
    Ranks,
)
from sklearn_mhla.identifiability._witness import NoWitness, Witness, find_witness


@dataclass(frozen=True)
class Options:
    """How inputs become rows."""

    n_tokens: int | None
    output: str
    causal: bool
    state: str
    device: str | None


@dataclass(frozen=True)
class Training:
    """The inputs that were certified.

    Attributes
    ----------
    design : Design
        Of the sequences of positive weight.
    sequences : Sequences
        All of them.
    weights : ndarray of shape (n,) or None
    """

    design: Design
    sequences: Sequences
    weights: np.ndarray | None


class IdentifiabilityCertificate:
    r"""What a set of inputs determines about a linear-attention model.

    Made by :func:`certify_identifiable`; not meant to be constructed directly. All numbers refer
    to the second moment of the published features, :math:`H[(j, k), l] = S_{jk} q_l` for
    :math:`j \le k` (Yau et al. [1]_, Algorithm 2), uncentred and divided by the number of rows:

    .. math:: \Lambda = \frac{1}{\sum_i w_i} \sum_i w_i H(Z_i) H(Z_i)^T .

    A certificate is true (``bool(certificate)``) only if the verdict is "identifiable"; "locally
    identifiable" leaves open whether a model far away agrees on all rows, so it counts as false.

    Parameters
    ----------
    spectrum : object
        What finds eigenvalues, null space and coverage.
    verdict : str
        See attributes.
    reason : str
        See attributes.
    ranks : object
        What is known of the second moment.
    model : object
        The class of models in question.
    method : str
        See attributes.
    options : object
        How inputs become rows.
    training : object
        The inputs, or None.

    Attributes
    ----------
    verdict : {"identifiable", "locally identifiable", "not identifiable", "undecided"}
        "identifiable": whatever the targets, all minimisers of the empirical risk compute one
        function. "not identifiable": for almost all targets from models of this kind they do
        not. "locally identifiable", with few heads: for almost all of these, other minimisers,
        if any, are far away. "undecided": none of this could be shown.
    reason : str
        The rule that gave the verdict, in one sentence.
    rank : int
        Rank of the second moment: directions of feature space that the inputs determine.
    n_features : int
        Number of features, ``p = d^2 (d + 1) / 2``.
    n_rows : int or None
        Rows of positive weight: sequences, or tokens for ``output="sequence"``. None if moments
        do not know.
    method : {"primal", "span", "exact"}
        How the rank was found.
    token_dim : int
        Width ``d`` of the tokens.
    tol : float
        Relative level below which a direction counted as absent.

    See Also
    --------
    certify_identifiable : Makes certificates.
    IdentifiabilityCertifier : The same inside a pipeline.
    sklearn_mhla.plotting.IdentifiabilityDisplay : Spectrum and coverage as pictures.

    Notes
    -----
    A certificate keeps a reference to the inputs. Pickled, it leaves them out: ``covers``,
    ``residual``, ``suggest`` and ``null_space`` work after loading; ``local_identifiability`` and
    ``find_witness`` do not, nor do the eigenvalues and the error bound of method "span" unless
    they were asked for before.

    References
    ----------
    .. [1] M. Yau, E. Akyurek, J. Mao, J. B. Tenenbaum, S. Jegelka and J. Andreas, "Learning
       Linear Attention in Polynomial Time", NeurIPS 2025, arXiv:2410.10101.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla import certify_identifiable
    >>> X = np.random.default_rng(0).standard_normal((100, 5, 2))
    >>> certificate = certify_identifiable(X)
    >>> certificate.verdict, certificate.rank, certificate.proven
    ('identifiable', 6, True)
    """

    def __init__(
        self,
        spectrum: MomentSpectrum | SpanSpectrum,
        verdict: str,
        reason: str,
        *,
        ranks: Ranks,
        model: Model,
        method: str,
        options: Options,
        training: Training | None,
    ) -> None:
        self.verdict = verdict
        self.reason = reason
        self.rank = ranks.rank
        self.n_features = ranks.n_features
        self.n_rows = ranks.n_rows
        self.method = method
        self.token_dim = ranks.token_dim
        self.tol = spectrum.tol
        self._spectrum = spectrum
        self._ranks = ranks
        self._model = model
        self._options = options
        self._training = training

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_training": None}

    @property
    def nullity(self) -> int:
        """Number of directions of feature space about which the inputs say nothing."""
        return self.n_features - self.rank

    @cached_property
    def eigenvalues(self) -> np.ndarray:
        """All ``p`` eigenvalues of the second moment, descending, shape (p,).

        Computed on first use, from the ``p x p`` matrix or from the ``rows x rows`` kernel. Zero
        beyond the rank; errors are relative to the largest.
        """
        values = self._spectrum.eigenvalues()
        with np.errstate(over="ignore", under="ignore"):
            published: np.ndarray = np.ldexp(values, 6 * self._spectrum.exponent)
        return published

    @cached_property
    def min_eigenvalue(self) -> float:
        """Smallest eigenvalue of the second moment.

        0 if the rank is not full, or if it is full but the eigenvalue is lost in the rounding
        errors of the ``p x p`` matrix, which happens below about 1e-14 of the largest.
        """
        return self._published(self._spectrum.min_eigenvalue)

    @cached_property
    def max_eigenvalue(self) -> float:
        """Largest eigenvalue of the second moment."""
        return self._published(self._spectrum.max_eigenvalue)

    @property
    def condition_number(self) -> float:
        """Largest over smallest eigenvalue; infinity if the latter is 0."""
        smallest = self._spectrum.min_eigenvalue
        return float(self._spectrum.max_eigenvalue) / smallest if smallest > 0.0 else math.inf

    @cached_property
    def lower_bound(self) -> float:
        r"""Proven lower bound of the smallest eigenvalue, 0 if nothing better could be shown.

        It holds for the exact second moment of the given floats: rounding errors of features, sums
        and factorisation are accounted for. Computed on first use, in about ``p^3``
        multiply-adds. Of moments from which others were subtracted nothing is proved.
        """
        return self._spectrum.lower_bound()

    @property
    def proven(self) -> bool:
        """Whether the verdict holds in exact arithmetic for the given floats.

        "identifiable" is proven by a positive `lower_bound`; "not identifiable", for models
        without a limit on heads, by a number of rows below that of the features or by sequences
        of single tokens; both by ``method="exact"``. The Jacobian test of few heads, in floating
        point and at random heads, is no proof.
        """
        if self.verdict == IDENTIFIABLE:
            return self.method == "exact" or self.lower_bound > 0.0
        if self.method == "exact":
            return not self._model.is_restricted
        return not self._model.is_restricted and self._ranks.bound < self.n_features

    def null_space(self, k: int | None = None) -> np.ndarray:
        """Functions that vanish on all training inputs.

        Parameters
        ----------
        k : int, optional
            How many; None for all.

        Returns
        -------
        ndarray of shape (k, p)
            Orthonormal coefficient vectors ``v`` of the published features: ``v @ H(Z) = 0``
            for every training input, up to rounding. Reshaped to ``(k, d (d + 1) / 2, d)`` they
            are indexed by the pair ``j <= k`` (rows of the upper triangle) and by ``l``.

        Raises
        ------
        ValueError
            If ``k`` is larger than the nullity.
        """
        k = self.nullity if k is None else k
        check_scalar(k, "k", (int, np.integer), min_val=0)
        if k > self.nullity:
            raise ValueError(f"k={k}, but the null space has dimension {self.nullity}.")
        if k == 0:
            return np.empty((0, self.n_features))
        return self._spectrum.null_space(int(k))

    def residual(self, X: Any) -> Any:
        r"""How far the features of inputs are outside the span of the training features.

        Parameters
        ----------
        X : array-like or list of arrays
            Inputs in any form that the estimators take, with tokens of the same width.

        Returns
        -------
        ndarray of shape (n,), or (n, T) or a list of (T_i,) for ``output="sequence"``
            :math:`1 - \|P \phi\|^2 / \|\phi\|^2` with isometric features :math:`\phi` and
            :math:`P` the projection on the span: 0 where every minimiser of the empirical risk
            over unrestricted heads predicts the same, 1 where the training inputs say nothing.
            If the coordinates of the training tokens differ in size by more than a factor of 32,
            they are first brought to about the same size.

        Raises
        ------
        ValueError
            If ``X`` is invalid or its tokens have another width.
        """
        sequences = self._check(X)
        return self._shaped(self._coverage.residual(self._design_of(sequences)), sequences)

    def covers(self, X: Any) -> Any:
        """For which inputs every minimiser predicts the same.

        Parameters
        ----------
        X : array-like or list of arrays
            As for `residual`.

        Returns
        -------
        ndarray of bool, shaped like `residual`
            Whether the features lie in the span of the training features, to 5e-7 of their
            length: the residual is not above 2.5e-13.

        Raises
        ------
        ValueError
            If ``X`` is invalid or its tokens have another width.
        """
        sequences = self._check(X)
        return self._shaped(self._coverage.covers(self._design_of(sequences)), sequences)

    def suggest(self, X_pool: Any, k: int) -> np.ndarray:
        """Which unlabelled inputs to label next.

        Greedy: the input whose features are farthest outside the span, relative to their
        length, then the one farthest outside the span enlarged by it, and so on.

        Parameters
        ----------
        X_pool : array-like or list of arrays
            Candidates, as for `residual`.
        k : int
            How many to choose.

        Returns
        -------
        ndarray of shape (k',)
            Rows of the pool in the order of choice; for ``output="sequence"`` counted token by
            token. Fewer than ``k`` if these already cover the whole pool.

        Raises
        ------
        ValueError
            If ``X_pool`` or ``k`` is invalid.
        """
        check_scalar(k, "k", (int, np.integer), min_val=0)
        if k == 0:
            return np.empty(0, dtype=np.intp)
        return self._coverage.suggest(self._design_of(self._check(X_pool)), int(k))

    def error_bound(self, X: Any, epsilon: float, minimum: float = 0.0) -> Any:
        r"""How far two good models can be apart on given inputs.

        Two models without a limit on heads whose mean squared training errors (weighted, summed
        over outputs) are at most ``epsilon`` satisfy

        .. math:: \|f(Z) - f'(Z)\|^2 \le 4 (\epsilon - L^*) \, \phi(Z)^T G^+ \phi(Z)

        on every covered input, where `G` is the second moment of the training features and
        :math:`L^*` the least error of any such model (Lemma A.7 of Yau et al. with the
        leverage in place of :math:`\|H\|^2 / \lambda_{min}`, which is never smaller, and
        with the square and the constant that its proof gives).

        Parameters
        ----------
        X : array-like or list of arrays
            As for `residual`.
        epsilon : float
            Mean squared training error that neither model exceeds.
        minimum : float, default=0.0
            The least mean squared training error, if known. A quarter of the bound then holds for
            the squared distance between the minimiser and any such model.

        Returns
        -------
        ndarray, shaped like `residual`
            The bound; infinite where the input is not covered.

        Raises
        ------
        ValueError
            If ``0 <= minimum <= epsilon`` does not hold, or ``X`` is invalid.
        """
        sequences = self._check(X)
        leverages = self._spectrum.leverage(
            self._design_of(sequences, equilibrate=isinstance(self._spectrum, SpanSpectrum))
        )
        return self._shaped(error_bound(leverages, epsilon, minimum), sequences)

    def local_identifiability(
        self, model: Any = None, *, n_heads: int | None = None, n_outputs: int | None = None
    ) -> LocalIdentifiability:
        r"""Whether a model with few heads can move without the training rows noticing.

        Compares the rank of the Jacobian of the predictions with that of the Jacobian of the
        function, both with respect to the heads.

        Parameters
        ----------
        model : fitted estimator, Heads or tuple (value, key_query), default=None
            Where the test is made; None takes random heads, where the ranks are those of almost
            all models.
        n_heads, n_outputs : int, default=None
            Size of the random heads; None takes what the certificate was asked for.

        Returns
        -------
        LocalIdentifiability
            True where no model close by agrees on all rows and computes another function.

        Raises
        ------
        ValueError
            If the numbers are unknown, or the certificate does not have its inputs.
        """
        heads = None
        if model is not None:
            heads = _checked_heads(model, self.token_dim)
        return local_identifiability(
            self._inputs("local_identifiability").design,
            heads,
            n_heads=self._model.n_heads if n_heads is None else n_heads,
            n_outputs=self._model.n_outputs if n_outputs is None else n_outputs,
            random_state=0,
        )

    def find_witness(
        self,
        y: Any,
        n_heads: int | None = None,
        *,
        n_starts: int = 10,
        max_iter: int = 100,
        random_state: Any = None,
        verbose: int = 0,
    ) -> Witness | NoWitness:
        """Search two models that agree on all training rows and differ elsewhere.

        Parameters
        ----------
        y : array-like, or Heads
            Training targets, in the form that :class:`MHLARegressor` takes; both models are then
            as good as the best fit that was found. Heads are a teacher, and the question is
            whether the inputs determine *this* model.
        n_heads : int, default=None
            Heads that the two models may have; None takes what the certificate was asked for.
        n_starts : int, default=10
            Random starts, and as many combinations of directions that the rows do not notice.
        max_iter : int, default=100
            Steps of every run.
        random_state : int, RandomState instance or None, default=None
            Seed.
        verbose : int, default=0
            1 or more prints a line per run.

        Returns
        -------
        Witness or NoWitness
            True where a pair was found and verified. Otherwise it says how hard the search was,
            which proves nothing.

        Raises
        ------
        ValueError
            If the targets are invalid, or the certificate does not have its inputs.
        """
        training = self._inputs("find_witness")
        targets = y
        if not isinstance(y, Heads):
            rows, _ = check_targets(y, training.sequences, self._options.output, "certificate")
            targets = rows_of_positive_weight(
                training.sequences, rows, training.weights, self._options.output
            ).targets
        return find_witness(
            training.design,
            targets,
            self._model.n_heads if n_heads is None else n_heads,
            n_starts=n_starts,
            max_iter=max_iter,
            random_state=random_state,
            verbose=verbose,
        )

    def _inputs(self, method: str) -> Training:
        if self._training is None:
            raise ValueError(
                f"{method} needs the training inputs, which this certificate does not have: it was "
                "made from moments or has been pickled. Call certify_identifiable on the inputs."
            )
        return self._training

    @cached_property
    def _coverage(self) -> NullSpace | Span:
        return self._spectrum.coverage()

    def _check(self, X: Any) -> Sequences:
        return check_sequences(X, n_tokens=self._options.n_tokens, token_dim=self.token_dim)

    def _design_of(self, sequences: Sequences, equilibrate: bool = True) -> Design:
        options = self._options
        return Design(
            sequences,
            backend_for(options.device, sequences.device, fall_back=True),
            output=options.output,
            causal=options.causal,
            state=options.state,
            equilibration=self._spectrum.equilibration if equilibrate else None,
        )

    def _shaped(self, rows: np.ndarray, sequences: Sequences) -> Any:
        """One number per row in the shape of the targets."""
        if self._options.output == "last":
            return rows
        if sequences.layout == "list":
            return np.split(rows, np.cumsum(sequences.lengths)[:-1])
        return rows.reshape(len(sequences), -1)

    def _published(self, eigenvalue: float) -> float:
        """An eigenvalue in the units of the tokens as they came."""
        with np.errstate(over="ignore", under="ignore"):
            return float(np.ldexp(eigenvalue, 6 * self._spectrum.exponent))

    def __bool__(self) -> bool:
        return self.verdict == IDENTIFIABLE

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}: {self.verdict}"]
        lines += [f"    {name:<12} {value}" for name, value in self._summary()]
        return "\n".join([*lines, f"    {self.reason}"])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align: left'>{html.escape(name)}</th>"
            f"<td style='text-align: left'>{html.escape(value)}</td></tr>"
            for name, value in [("verdict", self.verdict), *self._summary()]
        )
        return (
            f"<table><caption>{type(self).__name__}</caption><tbody>{rows}"
            f"<tr><td colspan='2' style='text-align: left'>{html.escape(self.reason)}</td></tr>"
            "</tbody></table>"
        )

    def _summary(self) -> list[tuple[str, str]]:
        """Names and values for display; nothing that would take long to compute."""
        rows = "unknown" if self.n_rows is None else str(self.n_rows)
        found = [
            ("rank", f"{self.rank} of {self.n_features} (nullity {self.nullity})"),
            ("rows", f"{rows} (method {self.method!r})"),
        ]
        if isinstance(self._spectrum, MomentSpectrum):
            low, high = self.min_eigenvalue, self.max_eigenvalue
            found.insert(1, ("eigenvalues", f"{low:.4g} to {high:.4g}"))
        return found


def _checked_heads(model: Any, token_dim: int) -> Heads:
    """Heads of an estimator or a pair."""
    pair = (model.value_, model.key_query_) if hasattr(model, "value_") else model
    try:
        value, key_query = (np.asarray(part, dtype=np.float64) for part in pair)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "model must be a fitted estimator or heads (value, key_query); got "
            f"{type(model).__name__}."
        ) from error
    d = token_dim
    if value.ndim != 3 or value.shape[2] != d or key_query.shape != (len(value), d, d):
        raise ValueError(
            f"model must hold value (n_heads, m, {d}) and key_query (n_heads, {d}, {d}); got "
            f"shapes {value.shape} and {key_query.shape}."
        )
    return Heads(value, key_query)
