"""A vocabulary that is spread over all ranks of a pipeline, as part of a program."""

from __future__ import annotations

from dataclasses import dataclass

from pipert.scheduler.action import VOCABULARY_COLLECTIVES, VOCABULARY_WORK, Kind
from pipert.scheduler.placement import Placement

#: All kinds of action that only a spread vocabulary has.
VOCABULARY_KINDS = (*VOCABULARY_WORK, *VOCABULARY_COLLECTIVES)


@dataclass(frozen=True)
class Vocabulary:
    """Embedding and head live as shards of their rows on every rank (Yeung et al. 2024, arXiv 2411.05288).

    Attributes:
        embedding: whether the embedding is trained in this program.
        head: whether the head is.
    """

    embedding: bool = True
    head: bool = True

    def kinds(self, trained: bool) -> tuple[Kind, ...]:
        """The kinds of which every rank does one for each micro-batch.

        Args:
            trained: whether any stage has a backward.
        """
        there = {Kind.T: self.head, Kind.SUM_H: trained, Kind.CAST_E: self.embedding, Kind.G: self.embedding}
        return tuple(kind for kind in VOCABULARY_KINDS if there.get(kind, True))

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of what is trained."""
        return tuple(name for name in ("embedding", "head") if getattr(self, name))


def home_stages(placement: Placement) -> tuple[int, ...]:
    """For each rank its first stage: there its shard is at home, and its vocabulary actions carry this number."""
    return tuple(placement.owners.index(rank) for rank in range(placement.num_ranks))
