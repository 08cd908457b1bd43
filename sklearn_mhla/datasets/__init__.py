"""Synthetic data whose true model is known."""

from sklearn_mhla.datasets._linear_attention import make_linear_attention

__all__ = ["make_linear_attention"]
