"""Certificates: what a set of inputs determines about a linear-attention model."""

from sklearn_mhla.identifiability._certificate import IdentifiabilityCertificate
from sklearn_mhla.identifiability._certifier import (
    IdentifiabilityCertifier,
    IdentifiabilityWarning,
    NotIdentifiableError,
)
from sklearn_mhla.identifiability._certify import certify_identifiable

__all__ = [
    "IdentifiabilityCertificate",
    "IdentifiabilityCertifier",
    "IdentifiabilityWarning",
    "NotIdentifiableError",
    "certify_identifiable",
]
