"""Gaussian sequences and the outputs of a random linear-attention teacher."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_scalar

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._heads import Heads
from sklearn_mhla._tokens import check_sequences


def make_linear_attention(
    n_samples: int = 100,
    n_tokens: int | tuple[int, int] = 16,
    n_features: int = 4,
    n_outputs: int = 1,
    n_heads: int = 1,
    *,
    noise: float = 0.0,
    output: str = "last",
    causal: bool = True,
    state: str = "sum",
    return_teacher: bool = False,
    random_state: Any = None,
) -> Any:
    r"""Sequences of Gaussian tokens and the outputs of a random linear-attention teacher.

    Tokens are standard normal. The teacher is ``y = sum_h V_h S Q_h q`` with entries of ``V_h``
    and ``Q_h`` drawn from :math:`N(0, 1/d)`, as in the synthetic experiments of Yau et al.,
    "Learning Linear Attention in Polynomial Time", arXiv 2410.10101, section 5.

    Parameters
    ----------
    n_samples : int, default=100
        Number of sequences.
    n_tokens : int or tuple (low, high), default=16
        Tokens per sequence; a tuple draws each length uniformly from ``low`` to ``high``
        inclusive and makes ``X`` a list.
    n_features : int, default=4
        Width ``d`` of a token.
    n_outputs : int, default=1
        Outputs ``m``; with 1, targets have no output axis.
    n_heads : int, default=1
        Heads of the teacher.
    noise : float, default=0.0
        Standard deviation of Gaussian noise added to the targets.
    output : {"last", "sequence"}, default="last"
        One target per sequence or one per token.
    causal : bool, default=True
        For ``output="sequence"``: prefix states or the state of the whole sequence.
    state : {"sum", "mean"}, default="sum"
        Whether the state is the sum or the mean over tokens.
    return_teacher : bool, default=False
        Whether to return the teacher as well.
    random_state : int, RandomState instance or None, default=None
        Seed; the same seed gives the same data.

    Returns
    -------
    X : ndarray of shape (n_samples, n_tokens, n_features), or list of ndarray
        The sequences; a list of ``(n_tokens_i, n_features)`` arrays for a length range.
    y : ndarray, or list of ndarray
        Targets of shape (n_samples,) or (n_samples, n_outputs); for ``output="sequence"``
        (n_samples, n_tokens) or (n_samples, n_tokens, n_outputs), a list for a length range.
    teacher : Heads
        ``value`` (n_heads, n_outputs, d) and ``key_query`` (n_heads, d, d); only returned if
        ``return_teacher`` is True.

    Raises
    ------
    ValueError
        If a number is out of range or an option is unknown.

    Examples
    --------
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> X, y, teacher = make_linear_attention(
    ...     5, n_tokens=(2, 6), n_features=3, n_outputs=2, return_teacher=True, random_state=0
    ... )
    >>> [len(sequence) for sequence in X], y.shape, teacher.value.shape
    ([6, 2, 5, 5, 5], (5, 2), (1, 2, 3))
    """
    for name, value in [
        ("n_samples", n_samples),
        ("n_features", n_features),
        ("n_outputs", n_outputs),
        ("n_heads", n_heads),
    ]:
        check_scalar(value, name, Integral, min_val=1)
    check_scalar(noise, "noise", Real, min_val=0.0)
    if not np.isfinite(noise):
        raise ValueError(f"noise must be finite; got {noise}.")
    for name, option, choices in [
        ("output", output, ("last", "sequence")),
        ("state", state, ("sum", "mean")),
    ]:
        if option not in choices:
            raise ValueError(f"{name} must be one of {choices}; got {option!r}.")
    ragged = isinstance(n_tokens, tuple)
    low, high = n_tokens if isinstance(n_tokens, tuple) else (n_tokens, n_tokens)
    check_scalar(low, "n_tokens (lower end)", Integral, min_val=1)
    check_scalar(high, "n_tokens (upper end)", Integral, min_val=low)

    random = check_random_state(random_state)
    lengths = random.randint(low, high + 1, size=n_samples) if ragged else np.full(n_samples, low)
    tokens = random.standard_normal((int(lengths.sum()), n_features))
    X: Any = (
        np.split(tokens, np.cumsum(lengths)[:-1])
        if ragged
        else tokens.reshape(n_samples, low, n_features)
    )
    teacher = Heads(
        random.standard_normal((n_heads, n_outputs, n_features)) / np.sqrt(n_features),
        random.standard_normal((n_heads, n_features, n_features)) / np.sqrt(n_features),
    )
    design = Design(
        check_sequences(X), NumpyBackend(), output=output, causal=causal, state=state, rescale=False
    )
    rows = design.matvec(teacher.coefficients())
    rows += noise * random.standard_normal(rows.shape)
    y: Any = rows[:, 0] if n_outputs == 1 else rows
    if output == "sequence":
        if ragged:
            y = np.split(y, np.cumsum(lengths)[:-1])
        else:
            y = y.reshape(n_samples, low, *y.shape[1:])
    return (X, y, teacher) if return_teacher else (X, y)
