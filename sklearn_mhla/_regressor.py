"""The regressor: validate, solve, store."""

from __future__ import annotations

import math
import sys
from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted, check_scalar

from sklearn_mhla._backend import Array, as_input_kind, backend_for
from sklearn_mhla._design import Design
from sklearn_mhla._features import n_cubic_features
from sklearn_mhla._heads import Heads, svd_heads
from sklearn_mhla._tokens import (
    Sequences,
    check_sample_weights,
    check_sequences,
    check_targets,
    compare_features,
    describe_columns,
    store_columns,
)
from sklearn_mhla.solvers import SOLVERS, LeastSquaresProblem, ProblemSize, choose_solver

_CHOICES = {
    "solver": ("convex",),
    "method": ("auto", *SOLVERS),
    "output": ("last", "sequence"),
    "state": ("sum", "mean"),
}


class MHLARegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    r"""Multi-head linear attention, learned in closed form.

    The model reads a sequence of tokens :math:`z_1, \dots, z_T \in R^d` through its state
    :math:`S = \sum_t z_t z_t^T` and its query :math:`q = z_T`, the last token:

    .. math:: y = b + \sum_h V_h S Q_h q .

    With unrestricted heads it is linear in :math:`p = d^2 (d + 1) / 2` cubic features
    (Yau et al. [1]_, section 2), so the global minimiser of

    .. math:: \sum_i w_i \| y_i - f(Z_i) \|^2 + \alpha \| W \|_F^2

    is computed by least squares; :math:`W` are the coefficients of the features, packed so that
    the norm does not depend on how a symmetric state is written down.

    Parameters
    ----------
    solver : {"convex"}, default="convex"
        Backend that fits the model. "convex" finds the global optimum in closed form.
    method : {"auto", "primal", "dual"}, default="auto"
        Algorithm of the convex solver. "primal" accumulates the ``p x p`` moments over blocks
        of rows (time linear in rows, memory independent of them); "dual" factors the
        ``rows x rows`` kernel and is for fewer rows than features. "auto" takes the smaller
        system that fits into memory; the choice is stored in ``method_``.
    alpha : float, default=0.0
        Ridge penalty, not negative, in units of squared features. 0 gives the least-squares
        solution of minimum norm, also when the data do not determine all coefficients.
    fit_intercept : bool, default=False
        Whether to add a constant :math:`b` to the model; it is not penalised.
    n_tokens : int, default=None
        How many tokens one row of a 2-D input holds, one after the other; None means that a
        row is a single token. Not used for 3-D input and lists.
    output : {"last", "sequence"}, default="last"
        One output per sequence, read at the last token, or one per token.
    causal : bool, default=True
        For ``output="sequence"``: whether position `t` reads the state of the first `t` tokens
        (True) or of the whole sequence (False).
    state : {"sum", "mean"}, default="sum"
        Whether the state is the sum over tokens or is divided by their number. "mean" suits
        sequences whose lengths vary widely.
    device : str, default=None
        "cpu", "cuda" or "cuda:<index>"; None computes where ``X`` is.
    verbose : int, default=0
        1 or more says which method was chosen and why, and shows progress over blocks of
        sequences.

    Attributes
    ----------
    coef_ : ndarray of shape (n_outputs, p)
        Coefficients of the packed cubic features ``svec(S) (x) q``; ``svec`` lists the upper
        triangle row by row, off-diagonal entries times sqrt(2), and the coordinate of ``q``
        runs fastest.
    intercept_ : ndarray of shape (n_outputs,)
        The constant, zeros if ``fit_intercept=False``.
    value_ : ndarray of shape (n_heads_, n_outputs, d)
        Value matrices. Computed from ``coef_`` on first use.
    key_query_ : ndarray of shape (n_heads_, d, d)
        Fused key-query matrices. Computed from ``coef_`` on first use.
    n_heads_ : int
        Number of heads in ``value_`` and ``key_query_``, at most ``min(n_outputs d, d^2)``.
    method_ : str
        The algorithm that was used.
    n_iter_ : int
        Steps of iterative refinement that the solution needed (0 for well-conditioned data).
    rank_ : int
        Number of directions of feature space that the data determine.
    token_dim_ : int
        Width ``d`` of the tokens.
    n_features_in_ : int
        Number of columns of a 2-D ``X``; ``token_dim_`` for 3-D input and lists.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Column names of a data frame; defined only if ``X`` had them.

    See Also
    --------
    function_distance : Distance of two models as functions.
    sklearn_mhla.datasets.make_linear_attention : Data from a known model.

    Notes
    -----
    Computation is in float64 whatever the type of ``X``, and predictions are float64. A torch
    tensor given to `predict` yields a torch tensor on the same device, anything else NumPy.

    References
    ----------
    .. [1] M. Yau, E. Akyurek, J. Mao, J. B. Tenenbaum, S. Jegelka and J. Andreas, "Learning
       Linear Attention in Polynomial Time", NeurIPS 2025, arXiv:2410.10101.

    Examples
    --------
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> X, y = make_linear_attention(n_samples=200, n_tokens=8, n_features=4, random_state=0)
    >>> X.shape
    (200, 8, 4)
    >>> model = MHLARegressor().fit(X[:100], y[:100])
    >>> round(model.score(X[100:], y[100:]), 12)
    1.0
    """

    # scikit-learn shows parameter descriptions only where it can link to documentation.
    _doc_link_module = "sklearn_mhla"
    _doc_link_template = "https://arxiv.org/abs/2410.10101"

    def __init__(
        self,
        *,
        solver: str = "convex",
        method: str = "auto",
        alpha: float = 0.0,
        fit_intercept: bool = False,
        n_tokens: int | None = None,
        output: str = "last",
        causal: bool = True,
        state: str = "sum",
        device: str | None = None,
        verbose: int = 0,
    ) -> None:
        self.solver = solver
        self.method = method
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.n_tokens = n_tokens
        self.output = output
        self.causal = causal
        self.state = state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MHLARegressor:
        """Find the global minimiser.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens * d), (n_samples, n_tokens, d), or list of \
n_samples arrays of shape (n_tokens_i, d)
            Sequences of tokens. All three forms give the same result.
        y : array-like of shape (n_samples,) or (n_samples, n_outputs)
            Targets. For ``output="sequence"``: (n_samples, n_tokens), (n_samples, n_tokens,
            n_outputs), or a list of (n_tokens_i,) or (n_tokens_i, n_outputs) arrays.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence, not negative; integers act like repetitions.

        Returns
        -------
        MHLARegressor
            This estimator, fitted.

        Raises
        ------
        ValueError
            If a parameter or the data are invalid.
        MemoryError
            If the method cannot fit into memory; says what to use instead.
        """
        self._check_params()
        sequences = check_sequences(X, n_tokens=self.n_tokens)
        columns = describe_columns(X, sequences)
        targets, target_ndim = check_targets(y, sequences, self.output, type(self).__name__)
        weights = check_sample_weights(sample_weight, len(sequences))
        backend = backend_for(self.device, sequences.device)
        size = ProblemSize(
            n_rows=len(targets),
            n_features=n_cubic_features(sequences.token_dim),
            n_outputs=targets.shape[1],
            token_dim=sequences.token_dim,
        )
        solver, reason = choose_solver(self.method, size, backend.available_memory())
        if self.verbose:
            print(f"[{type(self).__name__}] method={solver.name!r}: {reason}")

        if weights is not None:
            sequences, targets, weights = self._drop_unweighted(sequences, targets, weights)
        design = self._design(sequences, rescale=True)
        # Targets are brought into [0.5, 1) as tokens are, by a power of two.
        target_exponent = math.frexp(np.abs(targets).max())[1]
        problem = LeastSquaresProblem(
            design,
            design.backend.asarray(np.ldexp(targets, -target_exponent)),
            None if weights is None else design.backend.asarray(weights),
            self.fit_intercept,
        )
        # Tokens were divided by 2 ** e: features by 2 ** 3e, so alpha goes down by 2 ** 6e.
        solution = solver(problem).solve(_scaled_alpha(self.alpha, design.exponent))

        coef = design.backend.to_numpy(solution.coef)
        with np.errstate(over="ignore"):
            coef = np.ldexp(coef, target_exponent - 3 * design.exponent)
        if not np.isfinite(coef).all():
            raise ValueError(
                "The coefficients, of the size of y divided by the cube of X, overflow float64. "
                "Rescale X or y."
            )
        store_columns(self, columns)
        self.coef_ = coef
        intercept = design.backend.to_numpy(solution.intercept)
        self.intercept_ = np.ldexp(intercept, target_exponent)
        self.method_ = solver.name
        self.n_iter_ = solution.n_iter
        self.rank_ = solution.rank
        self.token_dim_ = sequences.token_dim
        self._target_ndim = target_ndim
        self._heads: Heads | None = None
        return self

    def predict(self, X: Any) -> Any:
        """Evaluate the model.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts. The token width must be that of the fit;
            the number of tokens is free for 3-D input and lists.

        Returns
        -------
        ndarray, or torch.Tensor if X is one, or list of ndarray
            Predictions in float64, shaped like the ``y`` of `fit`. A list for
            ``output="sequence"`` if ``X`` is a list.
        """
        check_is_fitted(self)
        sequences = self._check_new(X)
        rows = self._predict_rows(sequences)
        if self._target_ndim == 0:
            rows = rows[:, 0]
        if self.output == "sequence":
            if sequences.layout == "list":
                parts = np.split(rows, np.cumsum(sequences.lengths)[:-1])
                return [as_input_kind(part, sequences.device) for part in parts]
            rows = rows.reshape(len(sequences), -1, *rows.shape[1:])
        return as_input_kind(rows, sequences.device)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Coefficient of determination, averaged over outputs.

        For ``output="sequence"`` every position counts as one observation.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts.
        y : array-like
            True targets, in the form that `fit` accepts.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence.

        Returns
        -------
        float
            1 is perfect, 0 is as good as the mean of ``y``.
        """
        from sklearn.metrics import r2_score  # a fifth of this package's import time

        check_is_fitted(self)
        sequences = self._check_new(X)
        targets, _ = check_targets(y, sequences, self.output, type(self).__name__)
        weights = check_sample_weights(sample_weight, len(sequences))
        if weights is not None and self.output == "sequence":
            weights = np.repeat(weights, sequences.lengths)
        return float(r2_score(targets, self._predict_rows(sequences), sample_weight=weights))

    @property
    def value_(self) -> np.ndarray:
        """Value matrices, shape (n_heads_, n_outputs, d)."""
        return self._computed_heads("value_").value

    @property
    def key_query_(self) -> np.ndarray:
        """Fused key-query matrices, shape (n_heads_, d, d)."""
        return self._computed_heads("key_query_").key_query

    @property
    def n_heads_(self) -> int:
        """Number of heads."""
        return len(self._computed_heads("n_heads_").value)

    def _computed_heads(self, attribute: str) -> Heads:
        """Heads of the fitted coefficients; a large SVD, so done when first asked for."""
        if not hasattr(self, "coef_"):
            raise AttributeError(
                f"This {type(self).__name__} is not fitted yet, so it has no {attribute}; call fit "
                "first."
            )
        if self._heads is None:
            self._heads = svd_heads(self.coef_, self.token_dim_)
        return self._heads

    def _check_params(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, choices))}; got "
                    f"{getattr(self, name)!r}."
                )
        for name in ("fit_intercept", "causal"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"{name} must be True or False; got {getattr(self, name)!r}.")
        check_scalar(self.alpha, "alpha", Real, min_val=0.0)
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha must be finite; got {self.alpha}.")
        check_scalar(self.verbose, "verbose", Integral, min_val=0)
        if self.n_tokens is not None:
            check_scalar(self.n_tokens, "n_tokens", Integral, min_val=1)

    def _check_new(self, X: Any) -> Sequences:
        compare_features(self, X)
        return check_sequences(X, n_tokens=self.n_tokens, token_dim=self.token_dim_)

    def _design(self, sequences: Sequences, rescale: bool) -> Design:
        return Design(
            sequences,
            backend_for(self.device, sequences.device),
            output=self.output,
            causal=self.causal,
            state=self.state,
            rescale=rescale,
            verbose=bool(self.verbose) and rescale,
        )

    def _drop_unweighted(
        self, sequences: Sequences, targets: np.ndarray, weights: np.ndarray
    ) -> tuple[Sequences, np.ndarray, np.ndarray]:
        """Leave out rows of weight zero and spread weights over the rows of a sequence."""
        kept = np.flatnonzero(weights)
        row_weights = (
            np.repeat(weights, sequences.lengths) if self.output == "sequence" else weights
        )
        if len(kept) < len(weights):
            sequences, targets = sequences.take(kept), targets[row_weights > 0]
        return sequences, targets, row_weights[row_weights > 0]

    def _predict_rows(self, sequences: Sequences) -> np.ndarray:
        design = self._design(sequences, rescale=False)
        rows: Array = design.matvec(design.backend.asarray(self.coef_))
        predictions: np.ndarray = design.backend.to_numpy(rows)
        predictions += self.intercept_
        return predictions

    def __dir__(self) -> list[str]:
        """Names of attributes; the heads are listed once computed.

        Displays of estimators evaluate every listed attribute.
        """
        computed = vars(self).get("_heads") is not None
        hidden = () if computed else ("value_", "key_query_", "n_heads_")
        names = (name for name in object.__dir__(self) if name not in hidden)
        return [name for name in names if hasattr(self, name)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def _scaled_alpha(alpha: float, exponent: int) -> float:
    try:
        return math.ldexp(float(alpha), -6 * exponent)
    except OverflowError:  # tokens so small that any penalty leaves nothing but the intercept
        return math.sqrt(sys.float_info.max)
