"""Standardised units: features of scaled tokens, and the same functions of them."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import Heads
from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._design import Design
from sklearn_mhla._features import cubic_features
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.identifiability._standardized import StandardizedDesign

UNITS = np.array([1e-3, 1.0, 5e4])
OPTIONS = [
    {"output": output, "causal": causal, "state": state}
    for output, causal in (("last", True), ("sequence", True), ("sequence", False))
    for state in ("sum", "mean")
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", [NumpyBackend(), TorchBackend("cpu")], ids=["numpy", "torch"])
def test_features_are_those_of_scaled_tokens(backend, options):
    X = [each * UNITS for each in reference.make_ragged([3, 1, 4], 3)]
    standard = StandardizedDesign(Design(check_sequences(X), backend, **options))
    scale = np.ldexp(standard.units, -standard.exponent)
    expected = reference.feature_matrix([each * scale for each in X], **options)
    coef = np.random.default_rng(0).standard_normal((2, 18))
    found = backend.to_numpy(standard.matvec(backend.asarray(coef)))
    assert reference.relative_error(found, expected @ coef.T) < 1e-13
    assert (np.frexp(standard.units)[0] == 0.5).all()  # powers of two


def test_states_are_of_about_unit_size():
    X = reference.make_sequences(0.0, 50) * UNITS
    standard = StandardizedDesign(Design(check_sequences(X), NumpyBackend()))
    squares = ((X * np.ldexp(standard.units, -standard.exponent)) ** 2).sum(1).mean(0)
    assert ((squares >= 0.5) & (squares < 2.0)).all()


def test_a_zero_coordinate_stays():
    X = reference.make_sequences(0.0, 5) * np.array([1.0, 0.0, 1.0])
    standard = StandardizedDesign(Design(check_sequences(X), NumpyBackend()))
    assert standard.units[1] == 1.0


def test_heads_compute_the_same_function():
    X = reference.make_sequences(0.0, 5) * UNITS
    standard = StandardizedDesign(Design(check_sequences(X), NumpyBackend()))
    heads = Heads(*reference.make_heads(2, 2, 3))
    inside = standard.from_user(heads)
    coef = inside.coefficients()
    features = [cubic_features(block.state, block.query) for block in standard.blocks()]
    expected = reference.predict_heads(*heads, X)
    assert reference.relative_error(np.concatenate(features) @ coef.T, expected) < 1e-13
    for part, again in zip(heads, standard.to_user(inside), strict=True):
        np.testing.assert_array_equal(part, again)


def test_the_design_given_is_left_as_it_was():
    X = reference.make_sequences(0.0, 5) * UNITS
    design = Design(check_sequences(X), NumpyBackend())
    before = [(block.state.copy(), block.query.copy()) for block in design.blocks()]
    list(StandardizedDesign(design).blocks())
    for block, (state, query) in zip(design.blocks(), before, strict=True):
        np.testing.assert_array_equal(block.state, state)
        np.testing.assert_array_equal(block.query, query)
