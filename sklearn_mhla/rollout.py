"""Autoregressive generation: the output becomes the next token."""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.utils.validation import check_is_fitted, check_scalar
from tqdm import trange

from sklearn_mhla._backend import Array, Backend, as_input_kind, backend_for
from sklearn_mhla._design import Design
from sklearn_mhla._features import n_pairs, packed_products, pair_scale, predict_block
from sklearn_mhla._regressor import MHLARegressor
from sklearn_mhla._tokens import Sequences, check_sequences, compare_features

__all__ = ["generate"]


def _one_hot(outputs: np.ndarray) -> np.ndarray:
    """A one at the largest output of every row."""
    tokens = np.zeros_like(outputs)
    tokens[np.arange(len(outputs)), outputs.argmax(axis=1)] = 1.0
    return tokens


def _one_hot_of_two(scores: np.ndarray) -> np.ndarray:
    """The same for two classes, of which a classifier has the score of the second only."""
    return _one_hot(np.hstack([np.zeros_like(scores), scores]))


_DECODERS: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda outputs: outputs,
    "round": lambda outputs: np.rint(outputs) + 0.0,  # no negative zeros
    "onehot": _one_hot,
}


def generate(
    model: Any,
    X: Any,
    n_steps: int,
    decode: str | Callable[[np.ndarray], np.ndarray] | None = None,
    *,
    stop: Callable[[np.ndarray], np.ndarray] | None = None,
    verbose: int = 0,
) -> Any:
    """Let a model continue sequences: each output, decoded, is appended as the next token.

    A sequence is carried by its state :math:`S = \\sum_t z_t z_t^T` and its last token. A step adds
    one outer product to the state, so it costs the same and takes the same memory,
    :math:`O(d^2)` per sequence, whatever the length of the history.

    Parameters
    ----------
    model : MHLARegressor, MHLARegressorCV, MHLAClassifier or MultiHeadLinearAttention
        A fitted estimator, or a torch module. Its outputs must be as wide as its tokens unless
        ``decode`` makes tokens of them.
    X : array-like of shape (n_samples, n_tokens * d), (n_samples, n_tokens, d), or list of \
n_samples arrays of shape (n_tokens_i, d)
        Prompts.
    n_steps : int
        Largest number of tokens to append.
    decode : {"round", "onehot"} or callable, default=None
        From outputs to tokens. None takes the outputs as they are (for a classifier: "onehot" of
        its decision function). "round" rounds to integers, "onehot" puts a one at the largest
        output and zeros elsewhere. A callable maps outputs (n, m), as a NumPy array, to tokens
        (n, d).
    stop : callable, default=None
        Maps the tokens just appended (n, d) to booleans (n,); a sequence ends with the first token
        for which it is true. Generation ends when all have.
    verbose : int, default=0
        1 or more shows progress over steps.

    Returns
    -------
    ndarray or torch.Tensor of shape (n_samples, n_steps, d), or list of these
        The tokens that were appended, without the prompts. With ``stop``, a list of
        ``(n_steps_i, d)`` arrays.

    Raises
    ------
    ValueError
        If outputs cannot be tokens of this model, or ``decode`` or ``stop`` return another shape.
    FloatingPointError
        If a token is not finite: without ``decode``, a model whose outputs grow feeds on them.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import AutomatonEncoding, FiniteAutomaton, make_dfa_execution
    >>> from sklearn_mhla.rollout import generate
    >>> size = dict(n_states=2, n_symbols=2, word_length=3)
    >>> X, y = make_dfa_execution(300, **size, random_state=0)
    >>> model = MHLARegressor().fit(X, y)
    >>> encoding, parity = AutomatonEncoding(**size), FiniteAutomaton(np.array([[0, 1], [1, 0]]))
    >>> prompt = encoding.prompt(parity, [1, 0, 1])
    >>> tokens = generate(model, [prompt], n_steps=6, decode="round")
    >>> encoding.states(np.vstack([prompt, tokens[0]])) == parity.run([1, 0, 1])
    True
    """
    check_scalar(n_steps, "n_steps", Integral, min_val=1)
    model = _as_estimator(model)
    decoder = _decoder(decode, model)
    if not (stop is None or callable(stop)):
        raise ValueError(f"stop must be None or callable; got {stop!r}.")
    compare_features(model, X)
    sequences = check_sequences(X, n_tokens=model.n_tokens, token_dim=model.token_dim_)
    backend = backend_for(model.device, sequences.device, fall_back=True)
    state, query, lengths = _start(sequences, backend)
    # Pairs of coordinates that no output depends on are left out: most, where tokens are one-hot.
    coef = model.coef_.reshape(len(model.coef_), -1, model.token_dim_)
    used = np.flatnonzero(coef.any(axis=(0, 2)))
    pairs = backend.index(used)
    coef = backend.asarray(coef[:, used].reshape(len(coef), -1))
    scale = backend.asarray(pair_scale(model.token_dim_)[used])
    state = backend.take(state, pairs)
    running = np.arange(len(sequences))
    tokens = np.zeros((len(sequences), n_steps, model.token_dim_))
    ends = np.full(len(sequences), n_steps)
    for step in trange(n_steps, desc="generate", unit="token", disable=not verbose):
        seen = state / lengths if model.state == "mean" else state
        outputs = backend.to_numpy(predict_block(seen, query[:, None], coef)[:, 0])
        appended = _checked(decoder(outputs + model.intercept_), query.shape, step)
        tokens[running, step] = appended
        query = backend.asarray(appended)
        state = state + backend.take(packed_products(query, backend), pairs) * scale
        lengths = lengths + 1.0
        if stop is not None:
            done = _ends(stop(appended.copy()), len(appended))
            ends[running[done]] = step + 1
            kept = backend.index(np.flatnonzero(~done))
            running, state, query, lengths = running[~done], state[kept], query[kept], lengths[kept]
            if not len(running):
                break
    if stop is None:
        return as_input_kind(tokens, sequences.device)
    return [
        as_input_kind(part[:end], sequences.device) for part, end in zip(tokens, ends, strict=True)
    ]


def _as_estimator(model: Any) -> Any:
    """A fitted estimator; a torch module is read into one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return MHLARegressor.from_torch(model)
    check_is_fitted(model)
    if not hasattr(model, "token_dim_"):
        raise ValueError(
            f"model must be an estimator or a module of sklearn_mhla; got {type(model).__name__}. "
            "Of a Pipeline, pass the last step and prompts that its other steps have transformed."
        )
    return model


def _decoder(decode: Any, model: Any) -> Callable[[np.ndarray], Any]:
    if decode is None and is_classifier(model):
        decode = "onehot"
    if callable(decode):
        return decode  # type: ignore[no-any-return]
    if not (decode is None or isinstance(decode, str)) or decode not in _DECODERS:
        raise ValueError(f"decode must be None, 'round', 'onehot' or callable; got {decode!r}.")
    n_outputs, decoder = len(model.coef_), _DECODERS[decode]
    if decode == "onehot" and is_classifier(model) and n_outputs == 1:
        n_outputs, decoder = 2, _one_hot_of_two
    if n_outputs != model.token_dim_:
        raise ValueError(
            f"The model has {n_outputs} outputs, its tokens have width {model.token_dim_}: outputs "
            "cannot be appended as they are. Pass decode=callable that makes tokens of them."
        )
    return decoder


def _checked(decoded: Any, shape: tuple[int, ...], step: int) -> np.ndarray:
    """Tokens to append, or an error that says at which step they cannot be."""
    tokens: np.ndarray = np.asarray(decoded, dtype=np.float64)
    if tokens.shape != tuple(shape):
        raise ValueError(
            f"decode must return one token per output, shape {tuple(shape)}; got {tokens.shape}."
        )
    # The next outputs are of degree three in the tokens.
    with np.errstate(over="ignore", invalid="ignore"):
        finite = bool(np.isfinite(np.abs(tokens).max(initial=0.0) ** 3))
    if not finite:
        raise FloatingPointError(
            f"The tokens at step {step} of the generation are too large or not finite (largest "
            f"{np.abs(tokens).max():.3g}); the outputs of this model grow when it reads them."
        )
    return tokens


def _ends(stopped: Any, n_sequences: int) -> np.ndarray:
    """Which sequences end, one boolean each."""
    done = np.asarray(stopped)
    if done.shape != (n_sequences,):
        raise ValueError(
            f"stop must return one boolean per sequence, shape ({n_sequences},); got {done.shape}."
        )
    return done.astype(bool)


def _start(sequences: Sequences, backend: Backend) -> tuple[Array, Array, Array]:
    """Packed states, last tokens and lengths of the prompts."""
    design = Design(sequences, backend, rescale=False)
    state = backend.empty((len(sequences), n_pairs(sequences.token_dim)))
    query = backend.empty((len(sequences), sequences.token_dim))
    for block in design.blocks():
        state[block.rows] = block.state
        query[block.rows] = block.query[:, 0]
    return state, query, backend.asarray(sequences.lengths[:, None])
