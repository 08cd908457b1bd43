r"""The exact rank of the features, proved in both directions with FLINT.

Floats are integers times powers of two, so the features lie in the ring ``Z[1/2]``, which maps into
the integers modulo any odd prime. The rank of the images is at most the true one: rows found
independent modulo a prime *are* independent. If they are fewer than rows and features allow,
their exact null space is computed over the integers, and every other row is shown to be
orthogonal to it: modulo as many primes as it takes for their product to exceed what the inner
products can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._features import pair_indices

# Residues of 31 bits: their products fit into int64.
_LARGEST_MODULUS = 2**31 - 1
# Entries of features worked on at a time.
_BLOCK_ENTRIES = 2**23


def exact_rank(design: Design) -> int:
    """Rank of the matrix of cubic features, with certainty.

    The rank is that of the second moment under any positive weights, in either packing, for
    summed and for mean states.

    Parameters
    ----------
    design : Design
        Tokens are taken as float64, whatever their values; the cost grows with the number of bits
        between the largest and the smallest, so this is meant for tokens that hold small integers.

    Returns
    -------
    int

    Raises
    ------
    ImportError
        If python-flint is not installed.
    """
    flint = import_flint()
    most = min(design.n_rows, design.n_features)
    for modulus in _primes(_LARGEST_MODULUS):
        independent = _independent_rows(design, modulus, flint)
        if len(independent) == most or _spans_all_rows(design, independent, flint):
            return len(independent)
        # The prime divides a minor that is not zero: another one will not.
    raise AssertionError("unreachable: there are infinitely many primes")


def import_flint() -> Any:
    """Import python-flint on demand, with an error that says what to install."""
    try:
        import flint
    except ImportError as error:
        raise ImportError(
            "Exact ranks need python-flint, which could not be imported. Install it with "
            "`pip install sklearn-mhla[exact]`."
        ) from error
    return flint


def _primes(largest: int) -> Iterator[int]:
    """Odd primes up to ``largest``, descending."""
    flint = import_flint()
    return (n for n in range(largest, 2, -1) if flint.fmpz(n).is_prime())


def _independent_rows(design: Design, modulus: int, flint: Any) -> np.ndarray:
    """Indices of rows that are independent modulo the prime and, almost surely, span the rest.

    A row in the span of those chosen so far is orthogonal to every vector of their null space;
    a random one tells with probability ``1 - 1 / modulus``.
    """
    random = np.random.default_rng(0)
    chosen = np.empty(0, dtype=np.intp)
    kept = np.empty((0, design.n_features), dtype=np.int64)
    probe = random.integers(0, modulus, design.n_features)
    for start, features in _residues(design, modulus):
        fresh = np.flatnonzero((features * probe % modulus).sum(1) % modulus)
        if len(fresh) == 0:
            continue
        stacked = np.concatenate([kept, features[fresh]])
        matrix = flint.nmod_mat(*stacked.shape, stacked.reshape(-1).tolist(), modulus)
        pivots = _leading(*matrix.transpose().rref())
        chosen = np.concatenate([chosen, start + fresh])[pivots]
        kept = stacked[pivots]
        if len(chosen) == design.n_features:
            break
        probe = _null_vector(matrix, modulus, random, flint)
    return chosen


def _null_vector(matrix: Any, modulus: int, random: np.random.Generator, flint: Any) -> np.ndarray:
    """A random vector that all rows annihilate modulo the prime."""
    echelon, rank = matrix.rref()
    pivots = _leading(echelon, rank)
    vector: np.ndarray = random.integers(0, modulus, matrix.ncols())
    vector[pivots] = 0
    image = echelon * flint.nmod_mat(len(vector), 1, vector.tolist(), modulus)
    vector[pivots] = [-int(image[row, 0]) % modulus for row in range(rank)]
    return vector


def _leading(echelon: Any, rank: int) -> list[int]:
    """Columns of the leading ones of a matrix in reduced row echelon form."""
    columns: list[int] = []
    column = 0
    for row in range(rank):
        while int(echelon[row, column]) == 0:
            column += 1
        columns.append(column)
    return columns


def _spans_all_rows(design: Design, chosen: np.ndarray, flint: Any) -> bool:
    """Whether every row lies in the span of the chosen, independent ones; a proof if True."""
    order = design.n_features
    rows = flint.fmpz_mat(len(chosen), order, _integer_rows(design, chosen))
    basis, nullity = rows.nullspace()  # in the first columns of a square matrix
    entries = [int(entry) for entry in basis.entries()]
    height = max(map(abs, entries))
    kind = np.int64 if height < 2**62 else object
    null_space = np.array(entries, dtype=kind).reshape(order, order)[:, :nullity]
    # A row times a power of two is integer and below 2^bits, its inner products below the bound.
    bound = order * height << _feature_bits(design)
    product = 1
    for modulus in _primes(math.isqrt(2**53 // order)):  # inner products are exact in float64
        image = (null_space % modulus).astype(np.float64)
        for _, features in _residues(design, modulus):
            if ((features.astype(np.float64) @ image) % modulus).any():
                return False
        product *= modulus
        if product > bound:
            return True
    raise AssertionError("unreachable: there are more primes than any proof needs")


def _residues(design: Design, modulus: int) -> Iterator[tuple[int, np.ndarray]]:
    """First row and residues of the features ``S_jk q_l`` (published packing), block by block."""
    left, right = pair_indices(design.token_dim)
    rows_at_once = min(design.n_features, max(1, _BLOCK_ENTRIES // design.n_features))
    for start, tokens in _blocks(design):
        residues = _token_residues(tokens, modulus)
        n_samples, n_tokens, _ = residues.shape
        states = residues[..., left] * residues[..., right] % modulus
        if design.output == "sequence" and design.causal:
            # At most 2^31 terms of 31 bits.
            states = (np.add.accumulate(states, axis=1) % modulus).reshape(-1, len(left))
        else:
            states = states.sum(1) % modulus
        queries = residues[:, -1]
        if design.output == "sequence":
            queries = residues.reshape(n_samples * n_tokens, -1)
            if not design.causal:
                states = np.repeat(states, n_tokens, axis=0)
        for first in range(0, len(states), rows_at_once):
            some = slice(first, first + rows_at_once)
            products = states[some, :, None] * queries[some, None, :] % modulus
            yield start + first, products.reshape(len(products), -1)


def _blocks(design: Design) -> Iterator[tuple[int, np.ndarray]]:
    """Tokens of consecutive sequences of one length, and the design row that is their first."""
    lengths = design.sequences.lengths
    rows = lengths if design.output == "sequence" else np.ones(len(lengths), dtype=np.intp)
    first_row = np.concatenate([[0], np.cumsum(rows)])
    changes = np.flatnonzero(np.diff(lengths)) + 1
    for start, stop in zip([0, *changes], [*changes, len(lengths)], strict=True):
        size = int(lengths[start]) * design.token_dim * (design.token_dim + 1) // 2
        step = max(1, _BLOCK_ENTRIES // size)
        for at in range(int(start), int(stop), step):
            chosen = slice(at, min(at + step, int(stop)))
            yield int(first_row[at]), design.sequences.tokens(chosen, NumpyBackend())


def _token_residues(tokens: np.ndarray, modulus: int) -> np.ndarray:
    """Images of floats ``m 2^e`` modulo an odd prime, where 2 has an inverse."""
    significand, exponent = _integer_parts(tokens)
    levels, position = np.unique(exponent, return_inverse=True)
    powers = np.array([pow(2, int(level), modulus) for level in levels])
    residues: np.ndarray = significand % modulus * powers[position].reshape(tokens.shape) % modulus
    return residues


def _integer_parts(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Odd integers ``m`` and exponents ``e`` with ``tokens = m 2^e``; zeros are 0 and 0."""
    fraction, exponent = np.frexp(tokens)
    significand = np.ldexp(fraction, 53).astype(np.int64)
    lowest_bit = np.frexp((significand & -significand).astype(np.float64))[1] - 1
    odd = significand >> np.maximum(lowest_bit, 0)
    return odd, np.where(odd != 0, exponent - 53 + lowest_bit, 0)


def _feature_bits(design: Design) -> int:
    """Bits of the largest feature once every sequence is multiplied to integers."""
    token_bits = 0
    for _, tokens in _blocks(design):
        odd, exponent = _integer_parts(tokens)
        highest = np.frexp(tokens)[1].max(axis=(1, 2), where=odd != 0, initial=-2000)
        lowest = exponent.min(axis=(1, 2), where=odd != 0, initial=2000)
        token_bits = max(token_bits, int((highest - lowest).max()))
    return 3 * token_bits + int(design.sequences.lengths.max()).bit_length()


def _integer_rows(design: Design, rows: np.ndarray) -> list[int]:
    """Entries of the given rows, each row multiplied by a power of two, as Python integers."""
    left, right = pair_indices(design.token_dim)
    per_token = design.output == "sequence"
    ends = np.cumsum(design.sequences.lengths)
    entries: list[int] = []
    for row in rows:
        sample = int(np.searchsorted(ends, row, side="right")) if per_token else int(row)
        tokens = design.sequences.tokens(np.array([sample]), NumpyBackend())[0]
        odd, exponent = _integer_parts(tokens)
        integers = odd.astype(object) << (exponent - exponent.min()).astype(object)
        query = len(tokens) - 1
        if per_token:
            query = int(row - (ends[sample] - len(tokens)))
        seen = integers[: query + 1] if per_token and design.causal else integers
        state = (seen.T @ seen)[left, right]
        entries += np.multiply.outer(state, integers[query]).reshape(-1).tolist()
    return entries
