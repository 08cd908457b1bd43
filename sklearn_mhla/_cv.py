"""The regressor that chooses its penalty and its number of heads by cross-validation."""

from __future__ import annotations

from typing import Any

from sklearn_mhla._cross_validation import fit_cross_validated, splits_of
from sklearn_mhla._model import LinearAttentionModel
from sklearn_mhla._parameters import check_cv_parameters


class MHLARegressorCV(LinearAttentionModel):
    r"""Multi-head linear attention with the penalty chosen by cross-validation.

    The model is that of :class:`MHLARegressor`. All penalties share one eigendecomposition, and
    the moments of all training sets are accumulated in one pass over the rows, so that a search
    costs a few fits. Leave-one-out errors are exact and need no refits.

    Parameters
    ----------
    alphas : float or array-like of shape (n_alphas,), default=None
        Penalties to try, as ``alpha`` of :class:`MHLARegressor`. None takes 21 of them, from
        1e-8 to 1e2 times the mean eigenvalue of the Gram matrix of the (centred) features; a
        change of the units of ``X`` then changes nothing. 0 is allowed with ``cv`` other than
        None.
    n_heads : int, None or list of these, default=None
        Number of heads, or the numbers to choose from; None sets no limit. A limit needs ``cv``
        other than None.
    cv : int, cross-validation generator or iterable, default=None
        None leaves out one sequence at a time. With ``output="sequence"`` all rows of the
        sequence are left out together. An integer is the number of folds; anything that
        :func:`sklearn.model_selection.check_cv` accepts works, over sequences.
    scoring : str or callable, default=None
        None is the negative mean squared error, with the weights of the sequences. A string
        names a scorer of scikit-learn; a callable is used as ``scoring(estimator, X, y)``, where
        ``X`` holds the predictions and ``estimator.predict`` returns it. Scorers get the weights
        if they can take ``sample_weight``. Leave-one-out scores all predictions together, folds
        are scored one by one and averaged.
    alpha_per_target : bool, default=False
        Whether every output has its own penalty. Not with a limit on heads.
    method : {"auto", "primal", "dual"}, default="auto"
        As in :class:`MHLARegressor`: eigenvectors of the ``p x p`` Gram matrix, or of the
        ``rows x rows`` kernel.
    fit_intercept : bool, default=False
        Whether to add a constant to the model; it is not penalised.
    n_tokens : int, default=None
        How many tokens one row of a 2-D input holds; None means a single one.
    output : {"last", "sequence"}, default="last"
        One output per sequence, read at the last token, or one per token.
    causal : bool, default=True
        For ``output="sequence"``: whether a position reads the state of the tokens up to it, or
        of the whole sequence.
    state : {"sum", "mean"}, default="sum"
        Whether the state is divided by the number of tokens.
    heads : {"minimal", "svd"}, default="minimal"
        How heads are found after an unrestricted fit, see :class:`MHLARegressor`.
    max_iter : int, default=200
        Steps of each run of the fit of few heads.
    tol : float, default=1e-6
        Tolerance of the fit of few heads, see :class:`MHLARegressor`.
    random_state : int, RandomState instance or None, default=None
        Seed of the restarts of the fit of few heads.
    device : str, default=None
        "cpu", "cuda" or "cuda:<index>"; None computes where ``X`` is.
    verbose : int, default=0
        1 or more says which method and penalty were chosen and shows progress.

    Attributes
    ----------
    alpha_ : float or ndarray of shape (n_outputs,)
        The chosen penalty; one per output if ``alpha_per_target`` and ``y`` has outputs.
    alphas_ : ndarray of shape (n_alphas,)
        Penalties that were tried.
    best_score_ : float or ndarray of shape (n_outputs,)
        Mean score of the chosen candidate.
    cv_results_ : dict of ndarrays
        ``param_n_heads``, ``param_alpha``, ``mean_test_score`` and ``rank_test_score``, one entry
        per candidate; with ``cv`` also ``split<k>_test_score`` and ``std_test_score``. Scores have
        a second axis of outputs where ``alpha_per_target`` applies.
    coef_ : ndarray of shape (n_outputs, p)
        Coefficients of the packed cubic features, fitted to all data.
    intercept_ : ndarray of shape (n_outputs,)
        The constant, zeros if ``fit_intercept=False``.
    value_ : ndarray of shape (`n_heads_`, n_outputs, d)
        Value matrices.
    key_query_ : ndarray of shape (`n_heads_`, d, d)
        Fused key-query matrices.
    n_heads_ : int
        Number of heads in ``value_`` and ``key_query_``.
    method_ : str
        The algorithm that was used.
    n_iter_ : int
        Steps of iterative refinement of the final fit, or of the fit of few heads.
    rank_ : int
        Number of directions of feature space that the data determine; an upper bound for
        ``alpha_ > 0``. Not with few heads.
    loss_ : float
        As in :class:`MHLARegressor`; with few heads only.
    gradient_norm_ : float
        As in :class:`MHLARegressor`; with few heads only.
    token_dim_ : int
        Width ``d`` of the tokens.
    n_features_in_ : int
        Number of columns of a 2-D ``X``; ``token_dim_`` for 3-D input and lists.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Column names of a data frame; defined only if ``X`` had them.

    See Also
    --------
    MHLARegressor : The model with a given penalty.
    sklearn.linear_model.RidgeCV : The same search for explicit features.

    Notes
    -----
    Leaving out a sequence of weight `w` leaves out all of it: integer weights act like repetitions
    in every fit, but a sequence given twice is left out once at a time.

    Examples
    --------
    >>> from sklearn_mhla import MHLARegressorCV
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> X, y = make_linear_attention(300, 8, 4, noise=0.3, random_state=0)
    >>> model = MHLARegressorCV().fit(X[:200], y[:200])
    >>> bool(model.score(X[200:], y[200:]) > 0.8)
    True
    >>> model = MHLARegressorCV(n_heads=[1, 2, None], cv=5).fit(X[:200], y[:200])
    >>> len(model.cv_results_["mean_test_score"]) == 3 * len(model.alphas_)
    True
    """

    def __init__(
        self,
        alphas: Any = None,
        *,
        n_heads: Any = None,
        cv: Any = None,
        scoring: Any = None,
        alpha_per_target: bool = False,
        method: str = "auto",
        fit_intercept: bool = False,
        n_tokens: int | None = None,
        output: str = "last",
        causal: bool = True,
        state: str = "sum",
        heads: str = "minimal",
        max_iter: int = 200,
        tol: float = 1e-6,
        random_state: Any = None,
        device: str | None = None,
        verbose: int = 0,
    ) -> None:
        self.alphas = alphas
        self.n_heads = n_heads
        self.cv = cv
        self.scoring = scoring
        self.alpha_per_target = alpha_per_target
        self.method = method
        self.fit_intercept = fit_intercept
        self.n_tokens = n_tokens
        self.output = output
        self.causal = causal
        self.state = state
        self.heads = heads
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> MHLARegressorCV:
        """Choose penalty and number of heads, then fit all data with them.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that :meth:`MHLARegressor.fit` accepts.
        y : array-like
            Targets, in the form that :meth:`MHLARegressor.fit` accepts.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence, not negative, in fits and scores.
        groups : array-like of shape (n_samples,), default=None
            Groups for the splitter given as ``cv``.

        Returns
        -------
        MHLARegressorCV
            This estimator, fitted.

        Raises
        ------
        ValueError
            If a parameter or the data are invalid.
        MemoryError
            If the eigendecomposition cannot fit into memory.
        """
        from sklearn.metrics import get_scorer  # both take a fifth of this package's import time
        from sklearn.model_selection import check_cv

        check_cv_parameters(self)
        scorer = get_scorer(self.scoring) if isinstance(self.scoring, str) else self.scoring
        splitter = None if self.cv is None else check_cv(self.cv)
        rows, attributes = self._validated(X, y, sample_weight)
        splits = None
        if splitter is not None:
            splits = splits_of(splitter, X, y, groups, sample_weight)
        fitted = fit_cross_validated(self, rows, splits, scorer, attributes["_target_ndim"])
        return self._store(attributes | fitted)
