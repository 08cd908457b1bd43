"""Synthetic data whose true model is known."""

from sklearn_mhla.datasets._automata import (
    AutomatonEncoding,
    AutomatonRun,
    FiniteAutomaton,
    make_dfa_execution,
)
from sklearn_mhla.datasets._in_context import make_in_context_regression
from sklearn_mhla.datasets._layout import TokenLayout
from sklearn_mhla.datasets._linear_attention import make_linear_attention
from sklearn_mhla.datasets._memories import make_associative_memory, make_key_value
from sklearn_mhla.datasets._turing import (
    Configuration,
    TuringMachine,
    TuringMachineEncoding,
    TuringRun,
    make_turing_machine,
)

__all__ = [
    "AutomatonEncoding",
    "AutomatonRun",
    "Configuration",
    "FiniteAutomaton",
    "TokenLayout",
    "TuringMachine",
    "TuringMachineEncoding",
    "TuringRun",
    "make_associative_memory",
    "make_dfa_execution",
    "make_in_context_regression",
    "make_key_value",
    "make_linear_attention",
    "make_turing_machine",
]
