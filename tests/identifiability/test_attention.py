"""Outputs as attention over raw tokens against the model written out entry by entry."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import Heads
from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.identifiability import _attention
from sklearn_mhla.identifiability._attention import attention_outputs

HEADS = Heads(*reference.make_heads(2, 2, 3))
INPUTS = {
    "array": reference.make_sequences(0.0, 5),
    "ragged": reference.make_ragged([3, 1, 4, 1, 2], 3),
    "one token": reference.make_sequences(0.0, 3, n_tokens=1),
    "one row": reference.make_sequences(0.0, 1),
}


@pytest.mark.parametrize("budget", [1, 30, 2**22])
@pytest.mark.parametrize("state", ["sum", "mean"])
@pytest.mark.parametrize(
    ("output", "causal"), [("last", True), ("sequence", True), ("sequence", False)]
)
@pytest.mark.parametrize("name", INPUTS)
def test_against_loops(monkeypatch, name, output, causal, state, budget):
    monkeypatch.setattr(_attention, "_SCORES", budget)
    X = INPUTS[name]
    options = {"output": output, "causal": causal, "state": state}
    found = attention_outputs(Design(check_sequences(X), NumpyBackend(), **options), HEADS)
    expected = reference.predict_heads(*HEADS, X, **options)
    assert reference.relative_error(found, expected) < 1e-13


def test_output_at_the_last_token_sees_all_of_them():
    X = INPUTS["array"]
    for causal in (True, False):
        design = Design(check_sequences(X), NumpyBackend(), causal=causal)
        expected = reference.predict_heads(*HEADS, X)
        assert reference.relative_error(attention_outputs(design, HEADS), expected) < 1e-13


def test_no_heads():
    none = Heads(np.zeros((0, 2, 3)), np.zeros((0, 3, 3)))
    design = Design(check_sequences(INPUTS["array"]), NumpyBackend())
    assert not attention_outputs(design, none).any()
