"""Tokens made of named blocks of one-hot coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np


class TokenLayout(Mapping[str, slice]):
    """Named blocks of coordinates, one after the other.

    Parameters
    ----------
    **sizes : int
        Number of coordinates of each block, in order.

    Attributes
    ----------
    token_dim : int
        Width of a token, the sum of the sizes.

    Examples
    --------
    >>> from sklearn_mhla.datasets import TokenLayout
    >>> layout = TokenLayout(position=3, symbol=2)
    >>> layout["symbol"]
    slice(3, 5, None)
    >>> layout.token(position=1, symbol=0)
    array([0., 1., 0., 1., 0.])
    >>> layout.read(layout.token(position=1, symbol=0))
    {'position': 1, 'symbol': 0}
    """

    def __init__(self, **sizes: int) -> None:
        ends = np.cumsum(list(sizes.values())).tolist()
        starts = [0, *ends[:-1]]
        self._slices = {
            name: slice(start, end) for name, start, end in zip(sizes, starts, ends, strict=True)
        }
        self.token_dim: int = ends[-1]

    def __getitem__(self, name: str) -> slice:
        return self._slices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={at.stop - at.start}" for name, at in self._slices.items())
        return f"TokenLayout({sizes})"

    def token(self, **places: int) -> np.ndarray:
        """A token with a one at the given place of each given block.

        Parameters
        ----------
        **places : int
            Place within the block, by name.

        Returns
        -------
        ndarray of shape (token_dim,)
            Zero everywhere else.
        """
        token = np.zeros(self.token_dim)
        for name, place in places.items():
            token[self[name]][place] = 1.0
        return token

    def read(self, token: np.ndarray) -> dict[str, int]:
        """The places of the blocks that hold a one.

        Parameters
        ----------
        token : ndarray of shape (token_dim,)
            A token, or a prediction of one; it is rounded first.

        Returns
        -------
        dict of str to int
            Blocks without a one are left out.
        """
        rounded = np.rint(np.asarray(token))
        places = {name: np.flatnonzero(rounded[at] == 1.0) for name, at in self.items()}
        return {name: int(found[0]) for name, found in places.items() if len(found)}
