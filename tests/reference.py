"""The model written out entry by entry, for tests to compare with.

Nothing here comes from the package and nothing here is fast. A sequence is an array of shape
``(T, d)``; heads are ``value`` ``(H, m, d)`` and ``key_query`` ``(H, d, d)``.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import lstsq, svd


def make_sequences(center, n_samples, n_tokens=5, token_dim=3, seed=1):
    """Gaussian tokens around ``center``: array (n_samples, n_tokens, token_dim)."""
    random = np.random.default_rng(seed)
    return center + random.standard_normal((n_samples, n_tokens, token_dim))


def make_ragged(lengths, token_dim, seed=1):
    """Gaussian sequences of the given lengths."""
    random = np.random.default_rng(seed)
    return [random.standard_normal((length, token_dim)) for length in lengths]


def make_heads(n_heads, n_outputs, token_dim, seed=2):
    """Random value and key-query matrices."""
    random = np.random.default_rng(seed)
    value = random.standard_normal((n_heads, n_outputs, token_dim))
    return value, random.standard_normal((n_heads, token_dim, token_dim))


def state_matrix(tokens, state="sum"):
    """``S[j, k] = sum_t z_t[j] z_t[k]``, divided by T for ``state="mean"``."""
    n_tokens, token_dim = tokens.shape
    total = np.zeros((token_dim, token_dim))
    for t in range(n_tokens):
        for j in range(token_dim):
            for k in range(token_dim):
                total[j, k] += tokens[t, j] * tokens[t, k]
    return total / n_tokens if state == "mean" else total


def states_and_queries(sequence, output="last", causal=True, state="sum"):
    """The pairs (S, q) at which one sequence is read, in order of position."""
    if output == "last":
        return [(state_matrix(sequence, state), sequence[-1])]
    whole = state_matrix(sequence, state)
    pairs = []
    for t in range(len(sequence)):
        seen = state_matrix(sequence[: t + 1], state) if causal else whole
        pairs.append((seen, sequence[t]))
    return pairs


def published_features(state, query):
    """``H[{j, k}, l] = S[j, k] q[l]`` for ``j <= k``, ``l`` fastest."""
    token_dim = len(query)
    features = []
    for j in range(token_dim):
        for k in range(j, token_dim):
            for position in range(token_dim):
                features.append(state[j, k] * query[position])
    return np.array(features)


def isometric_features(state, query):
    """As ``published_features``, with sqrt(2) on the entries ``j < k``."""
    token_dim = len(query)
    features = []
    for j in range(token_dim):
        for k in range(j, token_dim):
            scale = 1.0 if j == k else math.sqrt(2.0)
            for position in range(token_dim):
                features.append(scale * state[j, k] * query[position])
    return np.array(features)


def kernel(pair, other):
    """``<S, S'>_F <q, q'>``."""
    (state, query), (other_state, other_query) = pair, other
    states = 0.0
    for j in range(len(query)):
        for k in range(len(query)):
            states += state[j, k] * other_state[j, k]
    queries = 0.0
    for j in range(len(query)):
        queries += query[j] * other_query[j]
    return states * queries


def heads_output(value, key_query, state, query):
    """``y[a] = sum_h sum_jkl V_h[a, j] S[j, k] Q_h[k, l] q[l]``."""
    n_heads, n_outputs, token_dim = value.shape
    result = np.zeros(n_outputs)
    for h in range(n_heads):
        for a in range(n_outputs):
            for j in range(token_dim):
                for k in range(token_dim):
                    for position in range(token_dim):
                        result[a] += (
                            value[h, a, j]
                            * state[j, k]
                            * key_query[h, k, position]
                            * query[position]
                        )
    return result


def predict_heads(value, key_query, sequences, output="last", causal=True, state="sum"):
    """Outputs of all rows, (rows, m)."""
    return np.array(
        [
            heads_output(value, key_query, *pair)
            for sequence in sequences
            for pair in states_and_queries(sequence, output, causal, state)
        ]
    )


def function_coefficients(value, key_query):
    """``p(Theta)[a, {j, k}, l]``, shape (m, p): what multiplies ``published_features``."""
    n_heads, n_outputs, token_dim = value.shape
    rows = []
    for a in range(n_outputs):
        row = []
        for j in range(token_dim):
            for k in range(j, token_dim):
                for position in range(token_dim):
                    total = 0.0
                    for h in range(n_heads):
                        total += value[h, a, j] * key_query[h, k, position]
                        if j < k:
                            total += value[h, a, k] * key_query[h, j, position]
                    row.append(total)
        rows.append(row)
    return np.array(rows)


def function_distance(model_a, model_b):
    """Frobenius distance of the two ``p(Theta)``."""
    a, b = function_coefficients(*model_a), function_coefficients(*model_b)
    total = 0.0
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            total += (a[i, j] - b[i, j]) ** 2
    return math.sqrt(total)


def feature_matrix(sequences, output="last", causal=True, state="sum"):
    """Isometric features of all rows, (rows, p); the loops over entries left to NumPy.

    ``tests/test_features.py`` compares it with ``isometric_features``.
    """
    rows = []
    for sequence in sequences:
        tokens = np.asarray(sequence, dtype=np.float64)
        token_dim = tokens.shape[1]
        upper = np.triu_indices(token_dim)
        scale = np.where(upper[0] == upper[1], 1.0, math.sqrt(2.0))
        positions = [len(tokens) - 1] if output == "last" else range(len(tokens))
        for t in positions:
            seen = tokens[: t + 1] if causal or output == "last" else tokens
            total = seen.T @ seen
            if state == "mean":
                total = total / len(seen)
            rows.append(np.kron(total[upper] * scale, tokens[t]))
    return np.array(rows)


def ridge(features, targets, alpha=0.0, fit_intercept=False, weights=None, tolerance=1e-9):
    """Weighted ridge on explicit features by an orthogonal factorisation.

    Minimises ``sum_i w_i |y_i - b - W phi_i|^2 + alpha |W|_F^2``. Singular values of the
    weighted, centred features below ``tolerance`` times that of the uncentred ones count as zero:
    centring leaves rounding errors where features are constant. With ``alpha = 0`` this is the
    solution of minimum norm, by LAPACK's least squares; otherwise every singular value ``s``
    is filtered to ``s / (s^2 + alpha)``. (Stacking ``sqrt(alpha) I`` below the features instead
    would multiply the residual's rounding by the square of the condition number.)

    Returns coefficients (m, p) and intercept (m,).
    """
    weights = np.ones(len(features)) if weights is None else np.asarray(weights, dtype=float)
    feature_mean, target_mean = np.zeros(features.shape[1]), np.zeros(targets.shape[1])
    if fit_intercept:
        for i in range(len(features)):
            feature_mean += weights[i] * features[i] / weights.sum()
            target_mean += weights[i] * targets[i] / weights.sum()
    root = np.sqrt(weights)[:, None]
    matrix, right = root * (features - feature_mean), root * (targets - target_mean)
    left, singular, basis = svd(matrix, full_matrices=False)
    kept = singular > tolerance * np.linalg.norm(root * features, 2)
    if not kept.any():
        coef = np.zeros((targets.shape[1], features.shape[1]))
    elif alpha == 0.0:
        # LAPACK's cut is relative to the largest singular value: put it in the middle of the gap.
        dropped = singular[~kept].max(initial=0.0)
        cut = max(math.sqrt(dropped * singular[kept].min()), 1e-15 * singular[0]) / singular[0]
        coef = lstsq(matrix, right, cond=cut)[0].T
    else:
        s = singular[kept, None]
        coef = (basis[kept].T @ (s / (s**2 + alpha) * (left[:, kept].T @ right))).T
    return coef, target_mean - coef @ feature_mean


def relative_error(computed, expected):
    """``|computed - expected| / |expected|`` in the Frobenius norm; absolute if expected is 0."""
    computed, expected = np.asarray(computed), np.asarray(expected)
    assert computed.shape == expected.shape, (computed.shape, expected.shape)
    size = float(np.linalg.norm(expected))
    distance = float(np.linalg.norm(computed - expected))
    return distance / size if size > 0.0 else distance


def unexplained(predicted, targets):
    """``1 - R^2`` pooled over outputs, from squares rather than from a rounded ``R^2``."""
    centred = targets - targets.mean(0)
    return float(((predicted - targets) ** 2).sum() / (centred**2).sum())
