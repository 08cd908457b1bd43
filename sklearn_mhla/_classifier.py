"""The classifier: labels to targets, a regressor, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from sklearn_mhla._backend import to_numpy
from sklearn_mhla._regressor import MHLARegressor, _streams
from sklearn_mhla._targets import check_labels, check_sample_weights

# What a fitted classifier passes on from its regressor.
_FITTED = (
    "coef_",
    "intercept_",
    "value_",
    "key_query_",
    "n_heads_",
    "method_",
    "n_iter_",
    "rank_",
    "loss_",
    "gradient_norm_",
    "dual_gap_",
    "loss_curve_",
    "validation_loss_curve_",
    "token_dim_",
    "n_features_in_",
    "feature_names_in_",
)


def _takes_batches(estimator: Any) -> bool:
    """Whether `partial_fit` exists."""
    if isinstance(estimator.class_weight, str):
        raise AttributeError(
            f"class_weight={estimator.class_weight!r} needs all labels at once, which partial_fit "
            "does not have; pass a dict of weights, or sample_weight."
        )
    return _streams(estimator)


class MHLAClassifier(ClassifierMixin, BaseEstimator):
    r"""Classification by multi-head linear attention, learned in closed form.

    Every class has a target, 1 for its own samples and 0 for the others; :class:`MHLARegressor`
    fits the targets, and the class of the largest output is predicted. Two classes share one
    target, 1 for the second class and -1 for the first. With an intercept other codes would give
    the same predictions; without one this code is that of a look-up: a value token that holds the
    one-hot class is read out exactly.

    Parameters
    ----------
    n_heads : int, default=None
        Number of heads of the model; None sets no limit.
    solver : {"convex", "sgd"}, default="convex"
        "convex" finds the global optimum in closed form, "sgd" minimises the same loss by
        mini-batch Adam on the heads.
    method : str, default="auto"
        Algorithm of the convex solver, see :class:`MHLARegressor`.
    alpha : float, default=0.0
        Strength of the penalty, not negative.
    penalty : {"l2", "nuclear"}, default="l2"
        Kind of the penalty, see :class:`MHLARegressor`.
    fit_intercept : bool, default=True
        Whether to add a constant per class; it is not penalised.
    class_weight : dict or "balanced", default=None
        Weight of every class, by label; "balanced" weighs a class inversely to its frequency. Only
        for ``output="last"``.
    n_tokens : int, default=None
        How many tokens one row of a 2-D input holds; None means that a row is a single token.
    output : {"last", "sequence"}, default="last"
        One label per sequence, or one per token.
    causal : bool, default=True
        For ``output="sequence"``: whether position `t` reads the state of the first `t` tokens.
    state : {"sum", "mean"}, default="sum"
        Whether the state is the sum over tokens or is divided by their number.
    heads : {"minimal", "svd"}, default="minimal"
        How ``value_`` and ``key_query_`` are found after an unrestricted fit.
    max_iter : int, default=200
        Limit of iterations, see :class:`MHLARegressor`.
    tol : float, default=1e-6
        Tolerance of iterations, see :class:`MHLARegressor`.
    learning_rate : float, default=0.01
        SGD: largest step of Adam.
    batch_size : int, default=32
        SGD: sequences per step.
    early_stopping : bool, default=False
        SGD: whether to stop when a held-out part no longer improves.
    validation_fraction : float, default=0.1
        SGD: size of that part.
    n_iter_no_change : int, default=10
        SGD: epochs without progress after which ``early_stopping`` stops.
    warm_start : bool, default=False
        SGD: whether `fit` starts from the heads of the previous fit.
    random_state : int, RandomState instance or None, default=None
        Seed of restarts and of SGD.
    device : str, default=None
        "cpu", "cuda" or "cuda:<index>"; None computes where ``X`` is.
    verbose : int, default=0
        1 or more says which method was chosen and shows progress.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Labels in sorted order.
    regressor_ : MHLARegressor
        The fitted regressor on the coded targets.
    coef_ : ndarray of shape (n_classes, p) or (1, p)
        Its coefficients; a single row for two classes. The other fitted attributes of
        :class:`MHLARegressor` (``intercept_``, ``value_``, ``key_query_``, ``n_heads_``,
        ``method_``, ``token_dim_`` and so on) are passed on as well.

    See Also
    --------
    MHLARegressor : What is fitted, and all its parameters.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla import MHLAClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((300, 6, 3))
    >>> y = np.where((X**2).sum((1, 2)) * X[:, -1, 0] > 0, "up", "down")
    >>> model = MHLAClassifier(alpha=1.0).fit(X[:200], y[:200])
    >>> bool(model.score(X[200:], y[200:]) > 0.8)
    True
    """

    classes_: np.ndarray
    regressor_: MHLARegressor

    def __init__(
        self,
        n_heads: int | None = None,
        *,
        solver: str = "convex",
        method: str = "auto",
        alpha: float = 0.0,
        penalty: str = "l2",
        fit_intercept: bool = True,
        class_weight: Any = None,
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
        self.class_weight = class_weight
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MHLAClassifier:
        """Learn to tell the classes apart.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens * d), (n_samples, n_tokens, d), or list of \
n_samples arrays of shape (n_tokens_i, d)
            Sequences of tokens.
        y : array-like of shape (n_samples,)
            Labels. For ``output="sequence"``: (n_samples, n_tokens), or a list of (n_tokens_i,)
            arrays.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence, not negative.

        Returns
        -------
        MHLAClassifier
            This estimator, fitted.

        Raises
        ------
        ValueError
            If a parameter or the data are invalid, or there is a single class.
        MemoryError
            If the method cannot fit into memory; says what to use instead.
        """
        labels, counts = self._labels(y)
        classes = np.unique(labels)
        if len(classes) < 2:
            raise ValueError(f"y has 1 class, {classes[0]}; a classifier needs at least 2 classes.")
        warm = self.warm_start and "regressor_" in vars(self)
        regressor = (self.regressor_ if warm else MHLARegressor()).set_params(**self._shared())
        weights = self._weights(labels, counts, sample_weight)
        self.regressor_ = regressor.fit(X, _coded(labels, counts, classes), weights)
        self.classes_ = classes
        return self

    @available_if(_takes_batches)  # type: ignore[untyped-decorator]
    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> MHLAClassifier:
        """Learn from one more batch; see :meth:`MHLARegressor.partial_fit`.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts.
        y : array-like or list of arrays
            Labels; a batch need not hold every class.
        classes : array-like of shape (n_classes,), default=None
            All labels that will ever occur; needed in the first call.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence, not negative.

        Returns
        -------
        MHLAClassifier
            This estimator, which now knows this batch too.

        Raises
        ------
        ValueError
            If ``classes`` is missing in the first call or differs from those of an earlier one, or
            if a label is not among them.
        """
        first = "regressor_" not in vars(self)
        if first and classes is None:
            raise ValueError(
                "classes must be passed to the first call of partial_fit: all labels that will "
                "ever occur."
            )
        known = np.unique(np.asarray(classes)) if first else self.classes_
        if len(known) < 2:
            raise ValueError(f"classes must hold at least 2 classes; got {known.tolist()}.")
        if classes is not None and not np.array_equal(np.unique(np.asarray(classes)), known):
            raise ValueError(
                f"classes must be those of the first call, {known.tolist()}; got "
                f"{np.asarray(classes).tolist()}."
            )
        labels, counts = self._labels(y)
        unseen = np.setdiff1d(labels, known)
        if len(unseen):
            raise ValueError(
                f"y has the label {unseen[0]}, which is not among classes={known.tolist()}."
            )
        regressor = MHLARegressor() if first else self.regressor_
        regressor.set_params(**self._shared())
        weights = self._weights(labels, counts, sample_weight)
        self.regressor_ = regressor.partial_fit(X, _coded(labels, counts, known), weights)
        self.classes_ = known
        return self

    def decision_function(self, X: Any) -> Any:
        """Outputs of the model.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts.

        Returns
        -------
        ndarray of shape (n_samples,) or (n_samples, n_classes)
            For two classes one number, positive for the second. For ``output="sequence"`` with an
            axis of tokens after the first, or a list.
        """
        check_is_fitted(self)
        return self.regressor_.predict(X)

    def predict(self, X: Any) -> Any:
        """Labels.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts.

        Returns
        -------
        ndarray of shape (n_samples,)
            For ``output="sequence"``: (n_samples, n_tokens), or a list if ``X`` is a list.
        """
        outputs = self.decision_function(X)
        if isinstance(outputs, list):
            return [self._decided(part) for part in outputs]
        return self._decided(outputs)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy.

        For ``output="sequence"`` every position counts as one observation.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts.
        y : array-like or list of arrays
            True labels.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence.

        Returns
        -------
        float
            Share of right labels.
        """
        labels, counts = self._labels(y)
        predicted = self.predict(X)
        if counts is None:
            agree = len(predicted) == len(labels)
        else:
            agree = [len(part) for part in predicted] == counts.tolist()
        if not agree:
            raise ValueError(
                "Found input variables with inconsistent numbers of samples: y must hold one label "
                f"per {'sequence' if counts is None else 'token'} of X."
            )
        weights = check_sample_weights(
            sample_weight, len(labels) if counts is None else len(counts)
        )
        if weights is not None and counts is not None:
            weights = np.repeat(weights, counts)
        right = labels == (predicted if counts is None else np.concatenate(list(predicted)))
        return float(np.average(right, weights=weights))

    def __getattr__(self, name: str) -> Any:
        """Fitted attributes of the regressor."""
        if name in _FITTED and "regressor_" in self.__dict__:
            return getattr(self.__dict__["regressor_"], name)
        return object.__getattribute__(self, name)

    def _shared(self) -> dict[str, Any]:
        """Parameters of the regressor."""
        parameters: dict[str, Any] = self.get_params(deep=False)
        del parameters["class_weight"]
        return parameters

    def _labels(self, y: Any) -> tuple[np.ndarray, np.ndarray | None]:
        return check_labels(y, self.output, type(self).__name__)

    def _weights(
        self,
        labels: np.ndarray,
        counts: np.ndarray | None,
        sample_weight: Any,
    ) -> np.ndarray | None:
        """Sample weights times class weights."""
        weights = check_sample_weights(
            sample_weight, len(labels) if counts is None else len(counts)
        )
        if self.class_weight is None:
            return weights
        if counts is not None:
            raise ValueError(
                "class_weight needs output='last': with one label per token a sequence has labels "
                "of several classes."
            )
        total = np.ones(len(labels)) if weights is None else weights.copy()
        counted = total > 0.0  # "balanced" knows no class without samples
        present = np.unique(labels[counted])
        by_class = compute_class_weight(
            self.class_weight, classes=present, y=labels[counted], sample_weight=total[counted]
        )
        total[counted] *= by_class[np.searchsorted(present, labels[counted])]
        return total

    def _decided(self, outputs: Any) -> np.ndarray:
        """Labels of outputs."""
        outputs = to_numpy(outputs)
        two = len(self.classes_) == 2
        code = (outputs > 0.0).astype(int) if two else outputs.argmax(axis=-1)
        labels: np.ndarray = self.classes_[code]
        return labels

    def __dir__(self) -> list[str]:
        """Names of attributes, with those of the regressor once it is fitted."""
        names = set(object.__dir__(self))
        if "regressor_" in vars(self):
            names |= set(_FITTED) & set(dir(self.regressor_))
        return sorted(names)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def _coded(labels: np.ndarray, counts: np.ndarray | None, classes: np.ndarray) -> Any:
    """Targets of the regressor; a list with one array per sequence if there are counts."""
    code = np.searchsorted(classes, labels)
    targets: np.ndarray = 2.0 * code - 1.0 if len(classes) == 2 else np.eye(len(classes))[code]
    return targets if counts is None else np.split(targets, np.cumsum(counts)[:-1])
