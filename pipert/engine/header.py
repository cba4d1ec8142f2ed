"""The header: once a step, before the first micro-batch, every rank tells every other what the step will be.

One exchange of small blobs over all ranks. From it each rank derives the same `Agreement`: how many micro-batches,
which of them have sizes that the boundaries do not know yet, which stages train, what each micro-batch weighs in the
loss of the whole batch, which samples of the global batch it holds. Whatever cannot be run is refused here, with the
same error on every rank, before anything else is sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from pipert.engine.loss import weights
from pipert.engine.refusals import decode
from pipert.errors import BatchError, ConfigError


@dataclass(frozen=True)
class Report:
    """What one rank knows about the step.

    Attributes:
        mode: what was called and under which autocast.
        refusal: class and message of an error found here, if any.
        signatures: owners of the first stage: for each micro-batch the digest of its inputs' structure, shapes, dtypes.
        samples: owners of the first stage: samples of each micro-batch.
        counts: owners of the last stage: what each micro-batch counts; None for its samples.
        trainable: the stages of this rank that have trainable parameters.
        pattern: digest of which parameters of this rank are trainable.
        ties: for each group of tied weights whether it is trainable here, or None where this rank holds no copy.
        vocabulary: whether the rows of a spread embedding and head are trainable here; empty where it is not spread.
    """

    mode: str
    refusal: tuple[str, str] | None = None
    signatures: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    counts: tuple[float, ...] | None = None
    trainable: tuple[int, ...] = ()
    pattern: str = ""
    ties: tuple[bool | None, ...] = ()
    vocabulary: tuple[bool, ...] = ()

    def encode(self) -> bytes:
        """The report as JSON."""
        return json.dumps(vars(self), separators=(",", ":")).encode()

    @staticmethod
    @lru_cache(maxsize=1024)
    def decode(data: bytes) -> Report:
        """Read `encode`'s bytes; most ranks report the same every step."""
        items: dict[str, Any] = json.loads(data)
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in items.items()
        }
        return Report(**fields)


@dataclass(frozen=True)
class Agreement:
    """What all ranks of one pipeline know alike before its step begins.

    Attributes:
        keys: for each micro-batch what the sizes at all its boundaries depend on.
        samples: for each micro-batch the indices of its samples in the global batch.
        counts: what each micro-batch counts.
        total: what the whole batch counts, over micro-batches and replicas.
        total_samples: samples of the whole batch.
        total_microbatches: micro-batches of the whole batch.
        weights: ``counts / total``.
        trainable_from: the first stage with a trainable parameter; the number of stages if there is none.
        ties: which groups of tied weights are trainable.
        alike: whether all replicas have as many micro-batches.
        vocabulary: whether a spread embedding and head are; empty where the vocabulary is not spread.
    """

    keys: tuple[tuple[str, ...], ...]
    samples: tuple[tuple[int, ...], ...]
    counts: tuple[float, ...]
    total: float
    total_samples: int
    total_microbatches: int
    weights: tuple[float, ...]
    trainable_from: int
    ties: tuple[bool, ...]
    alike: bool
    vocabulary: tuple[bool, ...] = ()

    @property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        return len(self.keys)


@dataclass(frozen=True)
class Position:
    """Where this rank stands, and who owns what.

    Attributes:
        pp, dp, tp: sizes of the mesh.
        replica: this rank's dp coordinate.
        shard: this rank's tp coordinate.
        first, last: the pp ranks that own the first and the last stage.
        stages: the number of stages.
        ranks: the world rank at each (pp, dp, tp) position.
    """

    pp: int
    dp: int
    tp: int
    replica: int
    shard: int
    first: int
    last: int
    stages: int
    ranks: Mapping[tuple[int, int, int], int]

    def rank_at(self, pp: int, dp: int, tp: int) -> int:
        """The world rank at a position."""
        return self.ranks[pp, dp, tp]


def agree(reports: Sequence[Report], position: Position) -> Agreement:
    """What follows from all ranks' reports, in world order.

    Raises:
        PipertError, ScheduleError: the first refusal that any rank reported.
        BatchError, ConfigError: the reports do not fit together.
    """
    _raise_refusal(reports)
    _check_same_call(reports)
    _check_replicas(reports, position)
    ties = _check_ties(reports)
    counts = [_counts_of(reports, position, replica) for replica in range(position.dp)]
    total = sum(count for own in counts for count in own)
    samples = [_input_report(reports, position, replica).samples for replica in range(position.dp)]
    inputs = _input_report(reports, position, position.replica)
    own_pipeline = [reports[position.rank_at(pp, position.replica, position.shard)] for pp in range(position.pp)]
    common = (inputs.mode, *(report.pattern for report in own_pipeline))
    trainable = [stage for report in own_pipeline for stage in report.trainable]
    return Agreement(
        keys=tuple((signature, *common) for signature in inputs.signatures),
        samples=_sample_indices(samples, position.replica),
        counts=counts[position.replica],
        total=total,
        total_samples=sum(map(sum, samples)),
        total_microbatches=sum(map(len, samples)),
        weights=weights(counts[position.replica], total),
        trainable_from=min(trainable, default=position.stages),
        ties=ties,
        alike=len(set(map(len, samples))) == 1,
        vocabulary=_check_vocabulary(reports),
    )


def _raise_refusal(reports: Sequence[Report]) -> None:
    for rank, report in enumerate(reports):
        if report.refusal is not None:
            raise decode(report.refusal, rank, len(reports))


def _check_same_call(reports: Sequence[Report]) -> None:
    for rank, report in enumerate(reports):
        if report.mode != reports[0].mode:
            raise ConfigError(
                f"rank 0 is in {reports[0].mode}, rank {rank} in {report.mode}; every rank must make the same "
                "calls, under the same autocast"
            )


def _check_replicas(reports: Sequence[Report], position: Position) -> None:
    """Replicas train the same parameters; the ranks of a tensor-parallel group get the same batch."""
    for pp, dp, tp in position.ranks:
        rank, model = position.rank_at(pp, dp, tp), position.rank_at(pp, 0, 0)
        if reports[rank].pattern != reports[model].pattern:
            raise ConfigError(
                f"ranks {model} and {rank} hold the same stages, but not the same parameters are trainable there; set "
                "requires_grad alike on every replica and tensor-parallel rank"
            )
        first = position.rank_at(pp, dp, 0)
        mine, theirs = reports[rank], reports[first]
        if (mine.signatures, mine.samples, mine.counts) != (theirs.signatures, theirs.samples, theirs.counts):
            raise BatchError(
                f"ranks {first} and {rank} are of one tensor-parallel group, but were given different batches; "
                "give them the same one"
            )


def _check_ties(reports: Sequence[Report]) -> tuple[bool, ...]:
    result = []
    for tie, flags in enumerate(zip(*(report.ties for report in reports), strict=True)):
        held = {flag for flag in flags if flag is not None}
        if len(held) > 1:
            frozen, trained = flags.index(False), flags.index(True)
            raise ConfigError(
                f"the copies of tied weight {tie} are frozen on rank {frozen} and trainable on rank {trained}; set "
                "requires_grad alike on all copies"
            )
        result.append(held.pop())
    return tuple(result)


def _check_vocabulary(reports: Sequence[Report]) -> tuple[bool, ...]:
    for rank, report in enumerate(reports):
        if report.vocabulary != reports[0].vocabulary:
            raise ConfigError(
                f"the rows of embedding and head are trainable {reports[0].vocabulary} on rank 0, {report.vocabulary} "
                f"on rank {rank}; set requires_grad alike on all ranks"
            )
    return reports[0].vocabulary


def _input_report(reports: Sequence[Report], position: Position, replica: int) -> Report:
    return reports[position.rank_at(position.first, replica, position.shard)]


def _counts_of(reports: Sequence[Report], position: Position, replica: int) -> tuple[float, ...]:
    """What the micro-batches of a replica count."""
    inputs = _input_report(reports, position, replica)
    last = position.rank_at(position.last, replica, position.shard)
    counts = inputs.samples if reports[last].counts is None else reports[last].counts
    assert counts is not None
    if len(counts) != len(inputs.samples):
        first = position.rank_at(position.first, replica, position.shard)
        raise BatchError(
            f"rank {first} has inputs for {len(inputs.samples)} micro-batches, rank {last} has targets for "
            f"{len(counts)}; give both the same batch"
        )
    return counts


def _sample_indices(samples: Sequence[Sequence[int]], replica: int) -> tuple[tuple[int, ...], ...]:
    """Indices in the global batch: the replicas' batches one after the other."""
    starts = accumulate(samples[replica], initial=sum(map(sum, samples[:replica])))
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, samples[replica], strict=False))
