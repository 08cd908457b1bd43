"""From ranks to a verdict: the rules, each with the sentence that names it."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from sklearn_mhla.identifiability._jacobian import LocalIdentifiability

IDENTIFIABLE = "identifiable"
LOCALLY_IDENTIFIABLE = "locally identifiable"
NOT_IDENTIFIABLE = "not identifiable"
UNDECIDED = "undecided"


@dataclass(frozen=True)
class Model:
    """The class of models that a certificate is about.

    Attributes
    ----------
    token_dim : int
    n_heads : int or None
    n_outputs : int or None
        None: unknown.
    """

    token_dim: int
    n_heads: int | None
    n_outputs: int | None

    @property
    def most_heads(self) -> int:
        """So many heads write every function: ``min(m d, d^2)``, ``d^2`` whatever ``m`` is."""
        d = self.token_dim
        return d * d if self.n_outputs is None else min(self.n_outputs * d, d * d)

    @property
    def is_restricted(self) -> bool:
        """Whether the number of heads limits which functions the model can compute."""
        return self.n_heads is not None and self.n_heads < self.most_heads


@dataclass(frozen=True)
class Ranks:
    """What is known of the second moment.

    Attributes
    ----------
    rank : int
    n_features : int
    n_rows : int or None
        None where only moments were given.
    single_tokens : bool
        Whether every state is the outer product of its query.
    token_dim : int
    """

    rank: int
    n_features: int
    n_rows: int | None
    single_tokens: bool
    token_dim: int

    @property
    def bound(self) -> int:
        """A rank that no data of this shape can exceed."""
        most = self.n_features if self.n_rows is None else min(self.n_rows, self.n_features)
        return min(most, comb(self.token_dim + 2, 3)) if self.single_tokens else most

    @property
    def why_deficient(self) -> str:
        """Why the rank is not full, as far as the shape of the data says."""
        rank, p = self.rank, self.n_features
        if self.single_tokens and self.bound < p:
            return (
                f"every sequence is a single token, so the features are cubic monomials and have "
                f"rank {rank} of {p} (at most {comb(self.token_dim + 2, 3)})"
            )
        if self.bound < p:
            rows = "1 row" if self.n_rows == 1 else f"{self.n_rows} rows"
            return f"{rows} cannot determine {p} coefficients (rank {rank})"
        return f"the second moment of the features has rank {rank} of {p}"


def decide(ranks: Ranks, model: Model, local: LocalIdentifiability | None) -> tuple[str, str]:
    """Verdict and reason.

    Parameters
    ----------
    ranks : Ranks
    model : Model
    local : LocalIdentifiability or None
        The Jacobian test at random heads, if it was made.
    """
    if ranks.rank == ranks.n_features:
        return IDENTIFIABLE, (
            f"The second moment of the features has full rank {ranks.rank}, so every minimiser "
            "of the empirical risk computes the same function (Yau et al., Lemma 2.3)."
        )
    because = ranks.why_deficient
    if not model.is_restricted:
        heads = (
            "no limit on heads"
            if model.n_heads is None
            else f"n_heads={model.n_heads}, which limits nothing from {model.most_heads} heads on"
        )
        return NOT_IDENTIFIABLE, (
            f"{_capital(because)}; with {heads}, full rank is necessary: different functions "
            "agree on all rows."
        )
    few = f"{_capital(because)}, which does not decide about n_heads={model.n_heads}"
    if model.n_outputs is None:
        return UNDECIDED, f"{few}; give n_outputs to test further."
    if local is None:
        return UNDECIDED, (
            f"{few}; the Jacobian test was left out as too large: ask `local_identifiability` or "
            "`find_witness`."
        )
    of = f"rank {local.rank_data} of {local.rank_function}"
    if not local:
        return NOT_IDENTIFIABLE, (
            f"{few}, but at random heads the Jacobian of the predictions has {of}: almost every "
            "model has others near it that agree on all rows."
        )
    some = "" if 2 * (model.n_heads or 0) < model.token_dim else "; exceptions exist from d / 2 on"
    return LOCALLY_IDENTIFIABLE, (
        f"{few}, but at random heads the Jacobian of the predictions has full {of}: almost no "
        f"model has others near it that agree on all rows{some}."
    )


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
