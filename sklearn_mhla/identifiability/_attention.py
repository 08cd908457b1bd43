r"""Outputs of heads as attention over raw tokens: neither features nor states are formed.

.. math:: y_t = \sum_h \sum_s (z_s^T Q_h z_t) \, V_h z_s

This is slower than the package's own prediction, ``rows T H d`` against ``rows d^2`` numbers, and
shares no arithmetic with it: claims about outputs are verified with it.
"""

from __future__ import annotations

import numpy as np

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._heads import Heads

_SCORES = 2**22  # scores held at a time


def attention_outputs(design: Design, heads: Heads) -> np.ndarray:
    """Outputs of heads of the user's tokens at all rows of a design, shape (rows, m)."""
    sequences, per_token = design.sequences, design.output == "sequence"
    n_heads, n_outputs, _ = heads.value.shape
    longest = int(sequences.lengths.max())
    per_query = longest * max(1, n_heads)
    n_queries = min(longest, max(1, _SCORES // per_query)) if per_token else 1
    n_sequences = max(1, _SCORES // (per_query * n_queries))
    parts = []
    for start in range(0, len(sequences), n_sequences):
        chosen = slice(start, start + n_sequences)
        tokens, lengths = sequences.tokens(chosen, NumpyBackend()), sequences.lengths[chosen]
        n_tokens = tokens.shape[1]
        first = 0 if per_token else n_tokens - 1
        blocks = [
            _attend(heads, tokens, lengths, np.arange(n_tokens)[at : at + n_queries], design)
            for at in range(first, n_tokens, n_queries)
        ]
        values = np.concatenate(blocks, axis=1)
        present = np.arange(first, n_tokens) >= n_tokens - lengths[:, None]
        parts.append(values[present])
    return np.concatenate(parts).reshape(-1, n_outputs)


def _attend(
    heads: Heads, tokens: np.ndarray, lengths: np.ndarray, positions: np.ndarray, design: Design
) -> np.ndarray:
    """Outputs (n, positions, m) of front-padded sequences."""
    n_tokens = tokens.shape[1]
    scores = np.einsum(
        "nsk,hkl,nrl->nrsh", tokens, heads.key_query, tokens[:, positions], optimize=True
    )
    counts = np.broadcast_to(lengths[:, None], (len(tokens), len(positions)))
    if design.causal:
        scores *= (np.arange(n_tokens) <= positions[:, None])[:, :, None]
        counts = np.maximum(positions + 1 - (n_tokens - counts), 1)
    outputs: np.ndarray = np.einsum("nrsh,haj,nsj->nra", scores, heads.value, tokens, optimize=True)
    return outputs / counts[:, :, None] if design.state == "mean" else outputs
