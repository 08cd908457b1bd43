"""Named blocks of one-hot coordinates."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sklearn_mhla.datasets import TokenLayout

SIZES = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 5), min_size=1)


@given(SIZES, st.data())
def test_blocks_partition_the_token_and_read_inverts_token(sizes, data):
    layout = TokenLayout(**sizes)
    assert list(layout) == list(sizes)
    assert layout.token_dim == sum(sizes.values())
    covered = [i for at in layout.values() for i in range(at.start, at.stop)]
    assert covered == list(range(layout.token_dim))
    chosen = data.draw(st.sets(st.sampled_from(sorted(sizes))))
    places = {name: data.draw(st.integers(0, sizes[name] - 1)) for name in sizes if name in chosen}
    token = layout.token(**places)
    assert token.sum() == len(places)
    noise = 0.3 * np.random.default_rng(0).uniform(-1, 1, token.shape)
    assert layout.read(token + noise) == places
    assert eval(repr(layout), {"TokenLayout": TokenLayout}).token_dim == layout.token_dim
