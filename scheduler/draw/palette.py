"""The colours of actions, the same in every picture: a hue for each kind, lighter for later stages and batches."""

from __future__ import annotations

import colorsys

from pipert.scheduler.action import VOCABULARY_COLLECTIVES, Kind

#: Hue in degrees, lightness and saturation of each kind; white text can be read on them, and they on light and dark.
_TONES: dict[Kind, tuple[float, float, float]] = {
    Kind.F: (217, 0.47, 0.72),
    Kind.B: (18, 0.47, 0.72),
    Kind.I: (338, 0.47, 0.55),
    Kind.W: (168, 0.33, 0.48),
    Kind.REDUCE: (268, 0.52, 0.45),
    Kind.TIE: (268, 0.62, 0.45),
    Kind.S: (48, 0.36, 0.75),
    Kind.T: (88, 0.33, 0.50),
    Kind.G: (128, 0.33, 0.40),
    **dict.fromkeys(VOCABULARY_COLLECTIVES, (48, 0.58, 0.45)),
    Kind.SCATTER: (268, 0.52, 0.45),
    Kind.GATHER: (46, 0.40, 0.62),
    Kind.FREE: (46, 0.60, 0.25),
    Kind.NORM: (292, 0.40, 0.35),
    Kind.STEP: (110, 0.33, 0.45),
    Kind.UNDO: (0, 0.40, 0.45),
    Kind.OFFLOAD: (192, 0.36, 0.40),
    Kind.RELOAD: (192, 0.48, 0.40),
}
_MESSAGE_TONE = (215, 0.60, 0.14)

#: What people call the kinds that are none.
NAMES: dict[Kind, str] = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.REDUCE: "reduction",
    Kind.TIE: "tied weights",
    Kind.S: "logits of a shard",
    Kind.T: "weight gradient of a head shard",
    Kind.G: "weight gradient of an embedding shard",
    Kind.CAST_H: "last output to all",
    Kind.STATS: "softmax statistics",
    Kind.SUM_H: "last output's gradient",
    Kind.SUM_E: "embedding",
    Kind.CAST_E: "embedding's gradient to all",
    Kind.SCATTER: "reduction to shards",
    Kind.GATHER: "gathering of weights",
    Kind.FREE: "freeing of weights",
    Kind.NORM: "norm of the gradients",
    Kind.STEP: "update",
    Kind.UNDO: "update undone",
    Kind.OFFLOAD: "activations to the host",
    Kind.RELOAD: "activations back",
}


def colour(kind: Kind, stage: float = 0.0, microbatch: float = 0.0) -> str:
    """The colour of an action as ``#rrggbb``.

    Args:
        kind: its kind.
        stage: its place among its rank's stages, from 0 (first) to 1 (last).
        microbatch: its place among the micro-batches, from 0 (first) to 1 (last).
    """
    hue, lightness, saturation = _TONES.get(kind, _MESSAGE_TONE)
    lightness += 0.13 * stage + 0.07 * microbatch
    levels = colorsys.hls_to_rgb((hue + 10 * microbatch) % 360 / 360, lightness, saturation)
    return "#" + "".join(f"{round(255 * level):02x}" for level in levels)


def is_light(fill: str) -> bool:
    """Whether dark text reads better on a colour than white (its relative luminance, as WCAG 2 defines it)."""
    red, green, blue = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
    luminance = sum(share * level**2.2 for share, level in ((0.2126, red), (0.7152, green), (0.0722, blue)))
    return bool(luminance > 0.38)


def share(index: int, count: int) -> float:
    """Where `index` is among `count`: from 0 for the first to 1 for the last."""
    return index / (count - 1) if count > 1 else 0.0
