"""Transformers that turn tables, series and sequences into tokens that say what matters.

The model is a homogeneous cubic of its tokens and does not see their order: :class:`TokenScaler`
brings readings to one scale, :class:`PositionFeatures` tells every token where it stands and adds
the constant that gives the model its terms of lower degree, :class:`QueryToken` appends the token
at which the sequence is read, :class:`SlidingWindows` cuts a long series into sequences and
:class:`LinearAttentionFeatures` is the cubic feature map itself.
"""

from sklearn_mhla.preprocessing._features import LinearAttentionFeatures
from sklearn_mhla.preprocessing._position import PositionFeatures
from sklearn_mhla.preprocessing._query import QueryToken
from sklearn_mhla.preprocessing._scaler import TokenScaler
from sklearn_mhla.preprocessing._windows import SlidingWindows

__all__ = [
    "LinearAttentionFeatures",
    "PositionFeatures",
    "QueryToken",
    "SlidingWindows",
    "TokenScaler",
]
