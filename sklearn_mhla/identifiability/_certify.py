"""From inputs to a certificate: validate, find the rank, decide."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.utils.validation import check_scalar

from sklearn_mhla._backend import Backend, backend_for, is_dask
from sklearn_mhla._design import Design
from sklearn_mhla._moments import Moments
from sklearn_mhla._span import Span
from sklearn_mhla._sums import Sums
from sklearn_mhla._targets import check_sample_weights
from sklearn_mhla._tokens import (
    check_sequences,
    rows_of_positive_weight,
)
from sklearn_mhla.identifiability._certificate import (
    IdentifiabilityCertificate,
    Options,
    Training,
)
from sklearn_mhla.identifiability._exact import exact_rank
from sklearn_mhla.identifiability._jacobian import LocalIdentifiability, local_identifiability
from sklearn_mhla.identifiability._spectrum import MomentSpectrum, SpanSpectrum
from sklearn_mhla.identifiability._verdict import Model, Ranks, decide

# Multiplications of the Jacobian test that `certify_identifiable` makes unasked.
_MOST_OPERATIONS = 2e11
# Larger weights are divided by a power of two, which changes nothing and keeps sums finite.
_LARGEST_EXPONENT = 900

# From that many features on a look at the rank of some rows is cheap beside p x p matrices.
_WORTH_A_LOOK = 2048
_CHOICES = {
    "output": ("last", "sequence"),
    "state": ("sum", "mean"),
    "method": ("auto", "primal", "span", "exact"),
}


def certify_identifiable(
    X: Any,
    *,
    n_heads: int | None = None,
    n_outputs: int | None = None,
    sample_weight: Any = None,
    n_tokens: int | None = None,
    output: str = "last",
    causal: bool = True,
    state: str = "sum",
    method: str = "auto",
    tol: float | None = None,
    device: str | None = None,
    verbose: int = 0,
) -> IdentifiabilityCertificate:
    r"""Decide whether inputs determine the function that a model learns from them.

    If the second moment of the cubic features has full rank, all minimisers of the empirical
    risk compute the same function, whatever the targets (Yau et al. [1]_, Lemma 2.3). For
    unrestricted heads the condition is necessary as well.

    Parameters
    ----------
    X : array-like, list of arrays, or Moments
        Training inputs in any form that :class:`~sklearn_mhla.MHLARegressor` takes (Dask
        collections are certified from their moments, as ``method="primal"`` does), or the
        :class:`~sklearn_mhla.Moments` of such inputs, whose own options then stand for
        ``n_tokens``, ``output``, ``causal`` and ``state``. Targets are not needed.
    n_heads : int, optional
        Number of heads of the model; None sets no limit. With fewer than
        ``min(n_outputs d, d^2)`` full rank is sufficient, not necessary; if it fails, the Jacobian
        of the predictions decides about models close to random ones, unless it would take more
        than 2e11 multiplications.
    n_outputs : int, optional
        Number of outputs ``m``. Only used with ``n_heads``; unknown, heads count as unlimited
        from ``d^2`` on.
    sample_weight : array-like of shape (n,), optional
        One weight per sequence. Rows of weight zero are left out; positive weights change
        eigenvalues, which are divided by their sum, but no span.
    n_tokens : int, optional
        Tokens per row of a 2-D input; None means that a row is a single token.
    output : {"last", "sequence"}, default="last"
        Whether the model has one output per sequence or one per token.
    causal : bool, default=True
        For ``output="sequence"``: prefix states or states of whole sequences.
    state : {"sum", "mean"}, default="sum"
        Whether states are sums over tokens or means.
    method : {"auto", "primal", "span", "exact"}, default="auto"
        "primal" accumulates the ``p x p`` second moment, in time linear in the number of rows.
        "span" factors the kernel of the rows with pivoting up to its rank ``r``:
        ``rows r (r + P + d)`` multiply-adds, ``P = d (d + 1) / 2``, and no matrix of size ``p``.
        "auto" takes "primal" if there are at least as many rows as features and it fits into
        memory, unless that finds a rank below the one of a sample of ``2 p`` rows by "span".
        "exact" computes the rank in exact arithmetic, which proves the verdict; it is meant for
        tokens that hold small integers and needs python-flint. Eigenvalues and coverage remain in
        floating point.
    tol : float, optional
        Relative level below which a direction counts as absent: of the largest eigenvalue of the
        second moment with features scaled to about equal size ("primal"), or of the squared
        length of a row ("span"). None: 64 units of rounding, or ``4 sqrt(min(rows, p))`` of
        them if that is more; it does not grow with the number of rows beyond ``p``.
    device : str, optional
        "cpu", "cuda" or "cuda:<index>"; None computes where ``X`` is.
    verbose : int, default=0
        1 or more says which method was chosen and shows progress.

    Returns
    -------
    IdentifiabilityCertificate
        Verdict, rank and eigenvalues, and what they say about further inputs.

    Raises
    ------
    ValueError
        If an input or a parameter is invalid.
    MemoryError
        If ``method="primal"`` does not fit.
    ImportError
        If ``method="exact"`` and python-flint is not installed.

    See Also
    --------
    IdentifiabilityCertifier : The same as a step of a pipeline.

    Notes
    -----
    The rank is a statement to working precision. It does not depend on the units of the
    coordinates of the tokens, and it does not change as rows are repeated. Moments hold squares:
    rows that are very small beside others, by size or weight, and tokens whose mean is about a
    hundred times their spread are lost in them, and "primal" understates the rank. "span" brings
    every row to unit length and has no such limit for sizes and weights.

    References
    ----------
    .. [1] M. Yau, E. Akyurek, J. Mao, J. B. Tenenbaum, S. Jegelka and J. Andreas, "Learning
       Linear Attention in Polynomial Time", NeurIPS 2025, arXiv:2410.10101.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla import certify_identifiable
    >>> X = np.random.default_rng(0).standard_normal((200, 5, 3))
    >>> certificate = certify_identifiable(X)
    >>> certificate.verdict, certificate.rank, certificate.n_features
    ('identifiable', 18, 18)
    >>> certify_identifiable(X[:10]).verdict
    'not identifiable'
    """
    for name, value in [("output", output), ("state", state), ("method", method)]:
        if value not in _CHOICES[name]:
            choices = ", ".join(map(repr, _CHOICES[name]))
            raise ValueError(f"{name} must be one of {choices}; got {value!r}.")
    for name, number in [("n_heads", n_heads), ("n_outputs", n_outputs), ("n_tokens", n_tokens)]:
        if number is not None:
            check_scalar(number, name, Integral, min_val=1)
    if tol is not None:
        check_scalar(tol, "tol", Real, min_val=0.0, max_val=1.0, include_boundaries="neither")
        if math.isnan(tol):
            raise ValueError("tol must be between 0 and 1; got nan.")
    if not isinstance(causal, (bool, np.bool_)):
        raise ValueError(f"causal must be True or False; got {causal!r}.")
    model = {"n_heads": n_heads, "n_outputs": n_outputs}
    if is_dask(X):
        from sklearn_mhla import distributed

        if method not in ("auto", "primal"):
            raise ValueError(
                "Dask collections are certified from their moments: method must be 'auto' or "
                f"'primal'; got method={method!r}."
            )
        moments = distributed.moments(
            X,
            sample_weight=sample_weight,
            n_tokens=n_tokens,
            output=output,
            causal=causal,
            state=state,
            device=device,
        )
        return certify_moments(moments, n_tokens=n_tokens, device=device, tol=tol, **model)
    if isinstance(X, Moments):
        if sample_weight is not None or method not in ("auto", "primal"):
            raise ValueError(
                "Moments are sums already: sample_weight must be None and method 'auto' or "
                f"'primal'; got method={method!r}."
            )
        X, n_tokens = 0 + X, X.n_tokens  # a copy
        return certify_moments(X, n_tokens=n_tokens, tol=tol, device=device, **model)
    sequences = check_sequences(X, n_tokens=n_tokens)
    weights = check_sample_weights(sample_weight, len(sequences))
    if weights is not None:
        excess = math.frexp(weights.max())[1] - _LARGEST_EXPONENT
        weights = np.ldexp(weights, -max(0, excess))
    n_rows = int(sequences.lengths.sum()) if output == "sequence" else len(sequences)
    rows = rows_of_positive_weight(sequences, np.empty((n_rows, 0)), weights, output)
    backend = backend_for(device, sequences.device)
    design = Design(
        rows.sequences, backend, output=output, causal=causal, state=state, verbose=bool(verbose)
    )
    chosen, because = _choose_method(method, design, backend)
    if verbose:
        print(f"[certify_identifiable] method={method!r}, eigenvalues by {chosen!r}: {because}")
    column = None if rows.weights is None else backend.asarray(rows.weights)[:, None]
    spectrum: MomentSpectrum | SpanSpectrum
    if chosen == "primal":
        sums = Sums.from_design(design, backend.zeros((design.n_rows, 0)), column)
        spectrum = MomentSpectrum(sums, tol)
        if method != "primal" and tol is None and _moments_are_too_coarse(spectrum.rank, design):
            chosen = "span"
            if verbose:
                print("[certify_identifiable] the rows have a higher rank than their moments show")
    if chosen == "span":
        spectrum = SpanSpectrum(design, column, tol)
    ranks = Ranks(
        rank=exact_rank(design) if method == "exact" else spectrum.rank,
        n_features=design.n_features,
        n_rows=design.n_rows,
        single_tokens=int(rows.sequences.lengths.max()) == 1,
        token_dim=design.token_dim,
    )
    kind = Model(design.token_dim, **model)
    local = _local_test(design, kind) if ranks.rank < ranks.n_features else None
    return IdentifiabilityCertificate(
        spectrum,
        *decide(ranks, kind, local),
        ranks=ranks,
        model=kind,
        method="exact" if method == "exact" else chosen,
        options=Options(n_tokens, output, causal, state, device),
        training=Training(design, sequences, weights),
    )


def certify_moments(
    moments: Sums,
    *,
    n_heads: int | None = None,
    n_outputs: int | None = None,
    n_tokens: int | None = None,
    device: str | None = None,
    tol: float | None = None,
) -> IdentifiabilityCertificate:
    """A certificate of the rows that moments were summed over.

    Parameters
    ----------
    moments : Sums
        Kept, so they must not be updated in place any more.
    n_heads, n_outputs, n_tokens, device, tol
        As for :func:`certify_identifiable`.
    """
    if moments.n_rows == 0:
        raise ValueError("These moments hold no rows.")
    spectrum = MomentSpectrum(moments, tol)
    ranks = Ranks(
        rank=spectrum.rank,
        n_features=moments.n_features,
        n_rows=moments.n_rows,
        single_tokens=moments.longest == 1,
        token_dim=moments.token_dim,
    )
    model = Model(moments.token_dim, n_heads, n_outputs)
    return IdentifiabilityCertificate(
        spectrum,
        *decide(ranks, model, None),
        ranks=ranks,
        model=model,
        method="primal",
        options=Options(n_tokens, moments.output, moments.causal, moments.state, device),
        training=None,
    )


def _choose_method(method: str, design: Design, backend: Backend) -> tuple[str, str]:
    """Method and why."""
    rows, p = design.n_rows, design.n_features
    # Packed and full moments, the factor, and a range basis where it is singular.
    needed, available = 8 * (4 * p * p + p * p // 4), backend.available_memory()
    if method == "primal" and needed > available:
        raise MemoryError(
            f"method='primal' needs {needed / 1e9:.3g} GB at p={p}, but only "
            f"{available / 1e9:.3g} GB are available. Use method='span'."
        )
    if method in ("primal", "span"):
        return method, f"method={method!r} was asked for"
    if rows < p:
        return "span", f"rows={rows} < p={p}"
    if needed > available:
        return "span", f"primal would need {needed / 1e9:.3g} GB"
    if p >= _WORTH_A_LOOK:
        sample = _sample(design, p // 8)
        rank = Span.from_design(sample).rank
        if rank < sample.n_rows // 2:
            return "span", f"p={p} <= rows={rows}, but {sample.n_rows} of them have rank {rank}"
    return "primal", f"p={p} <= rows={rows}"


def _moments_are_too_coarse(rank: int, design: Design) -> bool:
    """Whether rows, each brought to unit length, have a higher rank than their moments."""
    n_rows, p = design.n_rows, design.n_features
    if rank == p or 16 * n_rows * p > design.backend.available_memory():
        return False
    return SpanSpectrum(_sample(design, 2 * p), None, None).rank > rank


def _sample(design: Design, n_rows: int) -> Design:
    """About that many rows of whole sequences, evenly spread; all if there are not more."""
    n_sequences = len(design.sequences)
    n_sampled = min(n_sequences, -(-n_rows * n_sequences // design.n_rows))
    return design.take(np.linspace(0, n_sequences - 1, n_sampled).astype(np.intp))


def _local_test(design: Design, model: Model) -> LocalIdentifiability | None:
    """The Jacobian test at random heads where it is wanted and takes about a minute at most."""
    n_heads, n_outputs, d = model.n_heads, model.n_outputs, model.token_dim
    if not model.is_restricted or n_heads is None or n_outputs is None:
        return None
    unknowns = n_heads * d * (n_outputs + d)
    per_row = n_heads**2 * d**3 * (d / 4 + n_outputs)
    if design.n_rows * per_row + 15 * unknowns**3 > _MOST_OPERATIONS:
        return None
    return local_identifiability(design, n_heads=n_heads, n_outputs=n_outputs, random_state=0)
