"""A step of a pipeline that certifies its inputs and passes them on."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

from sklearn_mhla._targets import check_targets
from sklearn_mhla._tokens import (
    check_sequences,
    compare_features,
    describe_columns,
    store_columns,
)
from sklearn_mhla.identifiability._certificate import IdentifiabilityCertificate
from sklearn_mhla.identifiability._certify import certify_identifiable

_ON_FAILURE = ("warn", "raise", "ignore")


class IdentifiabilityWarning(UserWarning):
    """The training inputs were not certified to determine the model.

    Notes
    -----
    Raised as a warning by :class:`IdentifiabilityCertifier` with ``on_failure="warn"``.

    Examples
    --------
    >>> from sklearn_mhla.identifiability import IdentifiabilityWarning
    >>> issubclass(IdentifiabilityWarning, UserWarning)
    True
    """


class NotIdentifiableError(ValueError):
    """The training inputs were not certified to determine the model.

    Notes
    -----
    Raised by :class:`IdentifiabilityCertifier` with ``on_failure="raise"``.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla import IdentifiabilityCertifier
    >>> from sklearn_mhla.identifiability import NotIdentifiableError
    >>> try:
    ...     IdentifiabilityCertifier(on_failure="raise").fit(np.ones((5, 3)))
    ... except NotIdentifiableError:
    ...     print("one input, told five times")
    one input, told five times
    """


def _rows_have_names(certifier: Any) -> bool:
    """Whether columns have names: those of 2-D inputs, and who knows before `fit`."""
    return bool(getattr(certifier, "_rows_are_flat", True))


class IdentifiabilityCertifier(TransformerMixin, BaseEstimator):
    """Certify the inputs of the next step of a pipeline.

    `fit` makes a certificate of the training inputs, `transform` returns its input as it is. In a
    cross-validation every training fold is certified.

    Parameters
    ----------
    n_heads : int, default=None
        Number of heads of the model; None sets no limit.
    on_failure : {"warn", "raise", "ignore"}, default="warn"
        What to do unless the verdict is "identifiable": warn with an `IdentifiabilityWarning`,
        raise a `NotIdentifiableError`, or only keep the certificate.
    n_tokens : int, default=None
        Tokens per row of a 2-D input; None means that a row is a single token.
    output : {"last", "sequence"}, default="last"
        Whether the model has one output per sequence or one per token.
    causal : bool, default=True
        For ``output="sequence"``: prefix states or states of whole sequences.
    state : {"sum", "mean"}, default="sum"
        Whether states are sums over tokens or means.
    method : {"auto", "primal", "span", "exact"}, default="auto"
        How the rank is found; see :func:`certify_identifiable`.
    tol : float, default=None
        Relative level below which a direction counts as absent.
    device : str, default=None
        "cpu", "cuda" or "cuda:<index>"; None computes where ``X`` is.
    verbose : int, default=0
        1 or more says which method was chosen and shows progress.

    Attributes
    ----------
    certificate_ : IdentifiabilityCertificate
        What the training inputs determine.
    n_features_in_ : int
        Number of columns of a 2-D ``X``; the width of a token for 3-D input and lists.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Column names of a data frame; defined only if ``X`` had them.

    See Also
    --------
    certify_identifiable : The same as a function.

    Examples
    --------
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn_mhla import IdentifiabilityCertifier, MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> X, y = make_linear_attention(n_samples=200, n_tokens=8, n_features=3, random_state=0)
    >>> model = make_pipeline(IdentifiabilityCertifier(), MHLARegressor()).fit(X, y)
    >>> model[0].certificate_.verdict
    'identifiable'
    """

    certificate_: IdentifiabilityCertificate
    _rows_are_flat: bool

    # scikit-learn shows parameter descriptions only where it can link to documentation.
    _doc_link_module = "sklearn_mhla"
    _doc_link_template = "https://arxiv.org/abs/2410.10101"

    def __init__(
        self,
        n_heads: int | None = None,
        *,
        on_failure: str = "warn",
        n_tokens: int | None = None,
        output: str = "last",
        causal: bool = True,
        state: str = "sum",
        method: str = "auto",
        tol: float | None = None,
        device: str | None = None,
        verbose: int = 0,
    ) -> None:
        self.n_heads = n_heads
        self.on_failure = on_failure
        self.n_tokens = n_tokens
        self.output = output
        self.causal = causal
        self.state = state
        self.method = method
        self.tol = tol
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> IdentifiabilityCertifier:
        """Certify training inputs.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that :class:`MHLARegressor` takes.
        y : array-like, default=None
            Targets; only the number of outputs is used, and only with ``n_heads``.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence, not negative.

        Returns
        -------
        IdentifiabilityCertifier
            The fitted transformer.

        Raises
        ------
        ValueError
            If the input or a parameter is invalid.
        NotIdentifiableError
            If ``on_failure="raise"`` and the verdict is not "identifiable".

        Warns
        -----
        IdentifiabilityWarning
            If ``on_failure="warn"`` and the verdict is not "identifiable".
        """
        if self.on_failure not in _ON_FAILURE:
            raise ValueError(
                f"on_failure must be one of {', '.join(map(repr, _ON_FAILURE))}; got "
                f"{self.on_failure!r}."
            )
        sequences = check_sequences(X, n_tokens=self.n_tokens)
        n_outputs = None
        if self.n_heads is not None and y is not None:
            targets, _ = check_targets(y, sequences, self.output, type(self).__name__)
            n_outputs = targets.shape[1]
        certificate = certify_identifiable(
            X,
            n_heads=self.n_heads,
            n_outputs=n_outputs,
            sample_weight=sample_weight,
            n_tokens=self.n_tokens,
            output=self.output,
            causal=self.causal,
            state=self.state,
            method=self.method,
            tol=self.tol,
            device=self.device,
            verbose=self.verbose,
        )
        store_columns(self, {"certificate_": certificate, **describe_columns(X, sequences)})
        if not certificate and self.on_failure == "raise":
            raise NotIdentifiableError(f"{_failure(certificate)} on_failure='warn' goes on.")
        if not certificate and self.on_failure == "warn":
            warnings.warn(
                f"{_failure(certificate)} certificate_.covers(X) tells which predictions the "
                "inputs determine all the same.",
                IdentifiabilityWarning,
                stacklevel=2,
            )
        return self

    def transform(self, X: Any) -> Any:
        """Pass inputs on.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences with tokens of the width of those in `fit`.

        Returns
        -------
        same type as X
            ``X`` itself; a table in nested lists becomes an array.

        Raises
        ------
        ValueError
            If the input is invalid or its tokens have another width.
        """
        check_is_fitted(self)
        compare_features(self, X)
        sequences = check_sequences(
            X, n_tokens=self.n_tokens, token_dim=self.certificate_.token_dim
        )
        # Tables that are no arrays yet, such as lists of rows, are of no use to the next step.
        return X if hasattr(X, "shape") or sequences.layout != "flat" else np.asarray(X)

    @available_if(_rows_have_names)  # type: ignore[untyped-decorator]
    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the columns, which are those of the input.

        Only for 2-D input; the tokens of 3-D input and lists have no names.

        Parameters
        ----------
        input_features : array-like of str, default=None
            Names to check against those of `fit`, or to use if `fit` saw none.

        Returns
        -------
        ndarray of str
            The names.
        """
        check_is_fitted(self)
        names: np.ndarray = _check_feature_names_in(self, input_features)
        return names

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def _failure(certificate: IdentifiabilityCertificate) -> str:
    return f"The verdict on the training inputs is {certificate.verdict!r}. {certificate.reason}"
