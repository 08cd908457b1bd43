"""Multi-head linear attention with the interface of scikit-learn."""

from sklearn_mhla._classifier import MHLAClassifier
from sklearn_mhla._cv import MHLARegressorCV
from sklearn_mhla._heads import Heads, function_distance
from sklearn_mhla._minimal_heads import minimal_heads
from sklearn_mhla._moments import Moments
from sklearn_mhla._nuclear_path import nuclear_norm_path
from sklearn_mhla._regressor import MHLARegressor
from sklearn_mhla.identifiability import (
    IdentifiabilityCertificate,
    IdentifiabilityCertifier,
    certify_identifiable,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "Heads",
    "IdentifiabilityCertificate",
    "IdentifiabilityCertifier",
    "MHLAClassifier",
    "MHLARegressor",
    "MHLARegressorCV",
    "Moments",
    "certify_identifiable",
    "function_distance",
    "minimal_heads",
    "nuclear_norm_path",
]
