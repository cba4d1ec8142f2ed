"""What an optimizer keeps for each parameter, in the parameter's own shape: from shards and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipert.comm.transport import Transport
from pipert.errors import ConfigError
from pipert.optim.bucket import Bucket, Entry
from pipert.optim.flat import Piece
from pipert.optim.rules import Rule

#: What the master weights of half-precision parameters are called beside the optimizer's own names.
MASTER = "master"


def gathered_states(buckets: Sequence[Bucket], rule: Rule, replicas: Transport) -> dict[str, dict[str, Any]]:
    """The states of all parameters of this rank by name, whole: tensors in their shapes, and numbers. Collective."""
    return {name: state for bucket in buckets for name, state in _gathered(bucket, rule, replicas).items()}


def _gathered(bucket: Bucket, rule: Rule, replicas: Transport) -> dict[str, dict[str, Any]]:
    pieces = list(zip(bucket.pieces, _pieces(bucket, rule), strict=True))
    numbers = [
        [piece.parameter, name, value]
        for piece, state in pieces
        for name, value in state.items()
        if not isinstance(value, torch.Tensor)
    ]
    tensors = [
        [piece.parameter, name] for piece, s in pieces for name, value in s.items() if isinstance(value, torch.Tensor)
    ]
    blob = json.dumps({"numbers": numbers, "tensors": tensors}).encode()
    told = [json.loads(one) for one in (replicas.exchange(blob) if bucket.zero else [blob])]
    states: list[dict[str, Any]] = [{} for _ in bucket.entries]
    for one in told:
        for parameter, name, value in one["numbers"]:
            states[parameter][name] = value
    for name in sorted({name for one in told for _, name in one["tensors"]}):
        whole = _whole(bucket, name, pieces, replicas)
        having = {parameter for one in told for parameter, other in one["tensors"] if other == name}
        for parameter, view in enumerate(bucket.views(whole)):
            if view is not None and parameter in having:
                states[parameter][name] = view.clone()
    return {entry.name: state for entry, state in zip(bucket.entries, states, strict=True) if state}


def _pieces(bucket: Bucket, rule: Rule) -> list[dict[str, torch.Tensor | float]]:
    """What is kept for each piece, with the master where that is not the parameter itself."""
    kept = rule.state(bucket) if bucket.group is not None else [{} for _ in bucket.pieces]
    if bucket.master is not None and bucket.master is not bucket.shard:
        master = bucket.master
        kept = [
            {**state, MASTER: master[piece.start : piece.stop]}
            for state, piece in zip(kept, bucket.pieces, strict=True)
        ]
    return [dict(state) for state in kept]


def _whole(bucket: Bucket, name: str, pieces: Sequence[Any], replicas: Transport) -> torch.Tensor:
    own = torch.zeros(bucket.layout.shard, dtype=bucket.precise, device=bucket.flat.device)
    for piece, state in pieces:
        if name in state:
            own[piece.start : piece.stop].copy_(state[name].reshape(-1))
    if not bucket.zero:
        return own
    flat = own.new_empty(bucket.layout.padded)
    replicas.wait(replicas.iallgather(flat, own), "gathering of the optimizer's state")
    return flat


def check_states(entries: Sequence[Entry], rule: Rule, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse states that are not of these parameters; the same answer on every replica.

    Raises:
        ConfigError: names are not those of parameters, something is missing, or a tensor has another shape.
    """
    if any(not isinstance(name, str) for name in states):
        raise ConfigError(
            f"a state by number ({', '.join(map(repr, list(states)[:3]))}, …), as torch's optimizers save it; give one "
            "by parameter name, as in state_dict() of pipert's own"
        )
    for entry in entries:
        kept = states.get(entry.name, {})
        missing = [name for name in rule.needs if kept and set(kept) != {MASTER} and name not in kept]
        if missing:
            raise ConfigError(f"the state of {entry.name} has no {missing[0]}; load one of the same optimizer")
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != entry.parameter.shape:
                raise ConfigError(
                    f"the state {name} of {entry.name} has shape {list(value.shape)}, the parameter "
                    f"{list(entry.parameter.shape)}; load the state of the same model"
                )


def load_states(buckets: Sequence[Bucket], rule: Rule, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give every shard its part of whole states that `check_states` has looked at."""
    for bucket in buckets:
        if bucket.group is None:
            continue
        kept: list[dict[str, Any]] = []
        for piece in bucket.pieces:
            entry = bucket.entries[piece.parameter]
            kept.append(
                {
                    name: _cut(value, bucket.shapes[piece.parameter], piece)
                    if isinstance(value, torch.Tensor)
                    else value
                    for name, value in states.get(entry.name, {}).items()
                }
            )
        _load_master(bucket, [state.pop(MASTER, None) for state in kept])
        rule.load(bucket, kept, [states.get(entry.name, {}) for entry in bucket.entries])


def _load_master(bucket: Bucket, parts: Sequence[torch.Tensor | None]) -> None:
    """The saved masters, or the weights as they are now."""
    if bucket.shard.dtype == bucket.precise:
        return
    master = bucket.need_master()
    for piece, part in zip(bucket.pieces, parts, strict=True):
        span = slice(piece.start, piece.stop)
        master[span].copy_(bucket.shard[span] if part is None else part)
    bucket.round_master()


def _cut(value: torch.Tensor | float, wanted: torch.Size, piece: Piece) -> torch.Tensor | float:
    """A piece of a tensor of the parameter's shape, which may be that of a single number; other numbers as they are."""
    if not isinstance(value, torch.Tensor) or value.shape != wanted:
        return value
    return value.reshape(-1)[piece.first : piece.first + piece.stop - piece.start]
