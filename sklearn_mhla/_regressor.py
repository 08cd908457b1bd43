"""The regressor: validate, solve, store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from sklearn_mhla._backend import import_torch, is_dask
from sklearn_mhla._fitting import (
    add_to_moments,
    attributes_of,
    check_same_options,
    design_of,
    fit_convex,
    fit_moments,
    fit_sgd_model,
)
from sklearn_mhla._model import SOLVED, LinearAttentionModel
from sklearn_mhla._parameters import check_parameters
from sklearn_mhla._sums import Sums
from sklearn_mhla._uncertainty import Posterior
from sklearn_mhla.identifiability import IdentifiabilityCertificate
from sklearn_mhla.identifiability._certify import certify_moments
from sklearn_mhla.solvers import Units


def _streams(estimator: Any) -> bool:
    """Whether `partial_fit` exists."""
    if estimator.solver == "convex" and estimator.method not in ("auto", "primal"):
        raise AttributeError(
            f"partial_fit adds up moments: it needs method='auto' or 'primal'; this "
            f"{type(estimator).__name__} has method={estimator.method!r}, which fits all rows at "
            "once."
        )
    return True


class MHLARegressor(LinearAttentionModel):
    r"""Multi-head linear attention, learned in closed form.

    The model reads a sequence of tokens :math:`z_1, \dots, z_T \in R^d` through its state
    :math:`S = \sum_t z_t z_t^T` and its query :math:`q = z_T`, the last token:

    .. math:: y = b + \sum_h V_h S Q_h q .

    With unrestricted heads it is linear in :math:`p = d^2 (d + 1) / 2` cubic features
    (Yau et al. [1]_, section 2), so the global minimiser of

    .. math:: \sum_i w_i \| y_i - f(Z_i) \|^2 + \alpha \| W \|_F^2

    is computed by least squares; :math:`W` are the coefficients of the features, packed so that
    the norm does not depend on how a symmetric state is written down.

    A model with a fixed number of heads is fitted by Levenberg-Marquardt on the heads, from
    the unrestricted solution. It has about :math:`H (m d + d^2)` unknowns instead of
    :math:`m p` and needs correspondingly fewer rows.

    Parameters
    ----------
    n_heads : int, default=None
        Number of heads of the model; None sets no limit, and so does any number from
        ``min(n_outputs d, d^2)`` on. The SGD solver trains as many heads as are asked for, None
        stands for ``min(n_outputs d, d^2)``: every function of the unrestricted model can be
        written with so many, and with two factors for its coefficients it is over-parametrised.
    solver : {"convex", "sgd"}, default="convex"
        "convex" finds the global optimum in closed form; with ``n_heads`` it starts from there.
        "sgd" minimises the same loss by mini-batch Adam on the heads; it needs torch.
    method : {"auto", "primal", "dual", "pivoted", "cg"}, default="auto"
        Algorithm of the convex solver. "primal" accumulates the ``p x p`` moments over blocks
        of rows (time linear in rows, memory independent of them) and keeps ``p ** 2 / 4`` numbers
        for `partial_fit`, in the pickled model too; "dual" factors the
        ``rows x rows`` kernel and is for fewer rows than features; "pivoted" looks for a basis
        among the rows and is for features of low rank, as one-hot tokens have (``rows x rank``
        numbers); "cg" takes preconditioned conjugate gradients, to a tolerance, and forms no
        matrix of these. "auto" takes the smaller system that fits into memory, "pivoted" for a
        large one whose rank turns out low and "cg" if none fits; the choice is stored in
        ``method_``. With ``n_heads``, "primal" works on the moments alone and "dual" on the rows;
        "cg" is for ``n_heads=None`` and the penalty "l2". Not used by SGD.
    alpha : float, default=0.0
        Strength of the penalty, not negative. For "l2" in units of squared features; 0 gives the
        least-squares solution of minimum norm, also when the data do not determine all
        coefficients.
    penalty : {"l2", "nuclear"}, default="l2"
        "l2" adds ``alpha / 2`` times the squared norm of the coefficients to half the sum of
        squares. "nuclear" adds ``alpha`` times the nuclear norm of the coefficient tensor
        unfolded to ``(n_outputs d) x d^2``, its antisymmetric part free: a convex way to few heads
        (the rank of the solution), which shrinks them too. See :func:`nuclear_norm_path`.
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
    heads : {"minimal", "svd"}, default="minimal"
        How ``value_`` and ``key_query_`` are found after an unrestricted fit: as few heads as
        reproduce the function (:func:`minimal_heads`), or the published singular value
        decomposition. `predict` does not depend on it.
    max_iter : int, default=200
        Steps of each run of the fit of ``n_heads`` heads; epochs (passes over the data) of the
        SGD solver, which runs all of them unless ``early_stopping`` ends it. The
        nuclear-norm method and conjugate gradients take up to ten times as many of their (cheap)
        iterations.
    tol : float, default=1e-6
        A run for ``n_heads`` has converged when a step lowers the loss by less than this times
        its value. SGD: smallest relative decrease of the held-out loss that counts as progress.
        Nuclear norm: duality gap relative to the loss of the zero model. Conjugate gradients
        stop when the gradient of every output has fallen to ``1e-4 tol`` (1e-10 by default)
        times that of the zero model, both in the metric of the preconditioner, which does not
        depend on the units of single features; what that leaves undecided, coefficients in
        directions that the data hardly determine, may be less accurate.
    learning_rate : float, default=0.01
        SGD: largest step of Adam. It refers to tokens and targets of root mean square one, to
        which they are scaled internally, so it does not depend on their units. In `fit` it
        rises linearly during the first tenth of the steps and falls to a hundredth along half
        a cosine; in `partial_fit` it is constant.
    batch_size : int, default=32
        SGD: sequences per step, with all their outputs for ``output="sequence"``.
    early_stopping : bool, default=False
        SGD: whether to hold out a part of the sequences, to stop when the loss on it has not
        fallen for ``n_iter_no_change`` epochs and to keep the heads that were best on it.
    validation_fraction : float, default=0.1
        SGD: part of the sequences that ``early_stopping`` holds out, between 0 and 1.
    n_iter_no_change : int, default=10
        SGD: epochs without progress after which ``early_stopping`` stops.
    warm_start : bool, default=False
        SGD: whether `fit` starts from the heads of the previous fit, by whichever solver.
        Conjugate gradients: from its coefficients; if the data do not determine all of them and
        ``alpha=0``, the solution is then one near these, not that of minimum norm.
    random_state : int, RandomState instance or None, default=None
        Seed of the restarts of the fit of ``n_heads`` heads, and of the first heads, the order
        of the sequences and the held-out part of SGD.
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
    value_ : ndarray of shape (`n_heads_`, n_outputs, d)
        Value matrices. Computed from ``coef_`` on first use.
    key_query_ : ndarray of shape (`n_heads_`, d, d)
        Fused key-query matrices. Computed from ``coef_`` on first use.
    n_heads_ : int
        Number of heads in ``value_`` and ``key_query_``, at most ``min(n_outputs d, d^2)``.
    method_ : str
        The algorithm that was used.
    n_iter_ : int
        Steps of iterative refinement that the solution needed (0 for well-conditioned data);
        iterations of conjugate gradients; with ``n_heads``, Levenberg-Marquardt steps of the
        best run; epochs of SGD.
    rank_ : int
        Number of directions of feature space that the data determine; an upper bound for
        ``alpha > 0`` and for ``method="cg"``. Not with ``n_heads``.
    loss_ : float
        Half the weighted residual sum of squares plus the penalty (half of it for "l2"); with
        ``n_heads``, for SGD and for the nuclear norm only.
    dual_gap_ : float
        Upper bound on how far ``loss_`` is from its minimum, relative to the loss of the zero
        model; for the nuclear norm only.
    loss_curve_ : list of float
        SGD: that sum per unit of weight, one number per epoch, averaged while the heads moved.
    validation_loss_curve_ : list of float
        SGD: half the weighted mean squared residual of the held-out part after every epoch; empty
        without ``early_stopping``.
    gradient_norm_ : float
        Gradient at the end, relative to Jacobian and targets; with ``n_heads`` only.
    token_dim_ : int
        Width ``d`` of the tokens.
    n_features_in_ : int
        Number of columns of a 2-D ``X``; ``token_dim_`` for 3-D input and lists.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Column names of a data frame; defined only if ``X`` had them.

    See Also
    --------
    MHLARegressorCV : The same with the penalty chosen by cross-validation.
    function_distance : Distance of two models as functions.
    sklearn_mhla.datasets.make_linear_attention : Data from a known model.

    Notes
    -----
    Computation is in float64 whatever the type of ``X``, and predictions are float64. A torch
    tensor given to `predict` yields a torch tensor on the same device, anything else NumPy. A
    model whose ``device`` is missing at predict time warns and computes on the CPU.

    SGD uses one thread on the CPU, so that a seed gives the same model everywhere. Training that
    diverges ends in a ConvergenceWarning and leaves finite heads.

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

    _optimizer: dict[str, Any] | None
    _posterior: Posterior
    _ridge: tuple[float, bool]
    _moments: Sums

    def __init__(
        self,
        n_heads: int | None = None,
        *,
        solver: str = "convex",
        method: str = "auto",
        alpha: float = 0.0,
        penalty: str = "l2",
        fit_intercept: bool = False,
        n_tokens: int | None = None,
        output: str = "last",
        causal: bool = True,
        state: str = "sum",
        heads: str = "minimal",
        max_iter: int = 200,
        tol: float = 1e-6,
        learning_rate: float = 0.01,
        batch_size: int = 32,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        warm_start: bool = False,
        random_state: Any = None,
        device: str | None = None,
        verbose: int = 0,
    ) -> None:
        self.n_heads = n_heads
        self.solver = solver
        self.method = method
        self.alpha = alpha
        self.penalty = penalty
        self.fit_intercept = fit_intercept
        self.n_tokens = n_tokens
        self.output = output
        self.causal = causal
        self.state = state
        self.heads = heads
        self.max_iter = max_iter
        self.tol = tol
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MHLARegressor:
        """Learn the coefficients.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens * d), (n_samples, n_tokens, d), or list of \
n_samples arrays of shape (n_tokens_i, d)
            Sequences of tokens. All three forms give the same result. A memory map, or an array in
            a file (h5py, zarr), is read in blocks, once to check and once to fit it (more often
            where an ill-conditioned solution is refined), and is never in memory as a whole.
            A Dask array or data frame is summed where its partitions are and fitted from the
            moments, see :mod:`sklearn_mhla.distributed`; ``y`` and ``sample_weight`` may be Dask
            collections then.
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
        ImportError
            If ``solver="sgd"`` and torch is not installed.
        """
        check_parameters(self)
        if is_dask(X):
            from sklearn_mhla.distributed import sum_for

            moments, attributes = sum_for(self, X, y, sample_weight)
            attributes.update(fit_moments(self, moments), _moments=moments)
            return self._store(attributes)
        rows, attributes = self._validated(X, y, sample_weight)
        solve = fit_sgd_model if self.solver == "sgd" else fit_convex
        return self._store(attributes | solve(self, rows))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Evaluate the model.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts. The token width must be that of the fit;
            the number of tokens is free for 3-D input and lists.
        return_std : bool, default=False
            Whether to return the standard deviation of the predictive distribution as well, noise
            included, in the view of Bayesian linear regression: noise variance from the residuals,
            uncertainty of the coefficients from the Gram matrix of the training features. Needs an
            unrestricted convex fit with ``method_`` "primal" or `partial_fit`, which keep the
            moments. The first call decomposes a ``p x p`` matrix.

        Returns
        -------
        y : ndarray, or torch.Tensor if X holds tensors, or list of these, or dask.array.Array
            Predictions in float64, shaped like the ``y`` of `fit`. A list for
            ``output="sequence"`` if ``X`` is a list. Of a Dask collection a Dask array, which is
            computed on request.
        std : like y
            Only if ``return_std`` is True. Infinite for ``alpha=0`` where the training data do not
            determine the output.

        Raises
        ------
        ValueError
            If ``return_std`` is not available for this fit, or for this kind of input.
        """
        if return_std and is_dask(X):
            raise ValueError(
                "return_std does not take Dask collections; call predict on one partition at a "
                "time, for example with X.map_blocks."
            )
        predictions = super().predict(X)
        if not return_std:
            return predictions
        if "_posterior" not in vars(self):
            self._posterior = self._fit_posterior()
        sequences = self._check_new(X)
        design = design_of(self, sequences, self._moments.backend)
        return predictions, self._shaped(self._posterior.deviation(design), sequences)

    def __getstate__(self) -> dict[str, Any]:
        """Without what `predict` can compute again."""
        return {
            name: value for name, value in super().__getstate__().items() if name != "_posterior"
        }

    def _fit_posterior(self) -> Posterior:
        if not hasattr(self, "_ridge") or "_moments" not in vars(self):
            raise ValueError(
                "return_std needs the moments of an unrestricted least-squares fit: "
                "solver='convex', method='primal', penalty='l2' and n_heads=None; this model was "
                f"fitted with method_={self.method_!r}"
                + ("." if hasattr(self, "_ridge") else " and restricted heads or another penalty.")
            )
        return Posterior.of(self._moments, *self._ridge)

    @available_if(_streams)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> MHLARegressor:
        """Learn from one more batch.

        With ``solver="convex"`` the model is that of `fit` to all batches at once, whatever their
        order and size (``method="primal"``, without its refinement where the data are
        ill-conditioned: relative errors up to 1e-16 times the condition number of the Gram matrix).
        Only the moments are kept, so memory does not depend on the number of rows. The
        coefficients are computed when they are first asked for, with the parameters of the last
        call. After `fit` a model goes on from there if ``method_`` is "primal"; other methods leave
        no moments.

        With ``solver="sgd"`` a call trains for one pass over the batch, from where the last call or
        `fit` stopped. The learning rate is constant; ``alpha`` weighs against the batch as it
        weighs against all data in `fit`. A model that was not trained by gradients before takes
        the units of tokens and targets from this batch.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts, with tokens of the same width each time.
        y : array-like
            Targets, in the form that `fit` accepts.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence, not negative.

        Returns
        -------
        MHLARegressor
            This estimator, which now knows this batch too.

        Raises
        ------
        ValueError
            If the batch does not fit the model so far, or if nothing is left of an earlier fit to
            add it to.
        MemoryError
            If the moments cannot fit into memory.
        FloatingPointError
            If the loss of SGD is not finite.

        Warns
        -----
        LinAlgWarning
            When coefficients are computed, if the moments determine them to fewer than four digits.
        """
        check_parameters(self)
        refit = "token_dim_" not in vars(self)
        moments = vars(self).get("_moments")
        if self.solver == "convex" and moments is None and not refit:
            raise ValueError(
                f"This {type(self).__name__} was fitted without moments, to which a batch could be "
                "added. Fit with method='primal' to go on from fit, or give all batches to "
                "partial_fit of an estimator that is not fitted yet (sklearn.base.clone makes one)."
            )
        if is_dask(X):
            from sklearn_mhla.distributed import sum_for

            if moments is not None:
                check_same_options(self, moments)
            batch, attributes = sum_for(self, X, y, sample_weight, refit)
            attributes["_moments"] = batch if moments is None else moments._add(batch, 1)
            return self._store(attributes | {"_unsolved": self.get_params(deep=False)})
        rows, attributes = self._validated(X, y, sample_weight, refit=refit)
        if self.solver == "sgd":
            return self._store(attributes | fit_sgd_model(self, rows, partial=True))
        attributes["_moments"] = add_to_moments(self, rows, moments)
        return self._store(attributes | {"_unsolved": self.get_params(deep=False)})

    def __getattr__(self, name: str) -> Any:
        """Solve for what `partial_fit` has left unsolved."""
        known = self.__dict__
        if name in SOLVED and "_unsolved" in known:
            known.update(fit_moments(SimpleNamespace(**known["_unsolved"]), known["_moments"]))
            del known["_unsolved"]
        return object.__getattribute__(self, name)

    @classmethod
    def from_torch(cls, module: Any) -> MHLARegressor:
        """A fitted estimator that predicts what a torch module computes.

        Parameters
        ----------
        module : MultiHeadLinearAttention
            From :mod:`sklearn_mhla.interop`, trained or not. Its numbers are copied.

        Returns
        -------
        MHLARegressor
            Fitted, with ``method_`` "torch" and the heads of the module; ``partial_fit`` and
            ``fit`` with ``warm_start`` train them further.

        Raises
        ------
        TypeError
            If ``module`` is of another class.
        ImportError
            If torch is not installed.
        """
        import_torch("from_torch()")
        from sklearn_mhla.interop._module import heads_of

        heads, intercept = heads_of(module)
        model = cls(
            n_heads=len(heads.value),
            solver="sgd",
            fit_intercept=module.bias is not None,
            output=module.output,
            causal=module.causal,
            state=module.state,
        )
        attributes = attributes_of(heads, intercept, Units(0, 0))
        attributes.update(method_="torch", n_iter_=0, _rows_are_flat=False)
        attributes.update(dict.fromkeys(("token_dim_", "n_features_in_"), heads.value.shape[2]))
        attributes["_target_ndim"] = 0 if module.squeeze else 1
        attributes["_n_outputs"] = heads.value.shape[1]
        return model._store(attributes)

    def certificate(self) -> IdentifiabilityCertificate:
        """What the training inputs determine about a model of this kind.

        Reuses the moments that `fit` with ``method_`` "primal" and `partial_fit` keep.

        Returns
        -------
        IdentifiabilityCertificate
            As :func:`certify_identifiable` makes it of the training inputs, without the Jacobian
            test of few heads. It does not consider the intercept.

        Raises
        ------
        ValueError
            If the fit kept no moments.
        """
        check_is_fitted(self)
        if not hasattr(self, "_moments"):
            raise ValueError(
                f"No moments to certify: method_={self.method_!r} keeps none, only 'primal' does. "
                "Call certify_identifiable on the training inputs."
            )
        return certify_moments(
            self._moments.copy(),  # partial_fit adds in place
            n_heads=self.n_heads,
            n_outputs=self._moments.n_outputs,
            n_tokens=self.n_tokens,
            device=self.device,
        )
