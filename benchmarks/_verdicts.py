"""Whether figures keep the bars that are set for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: What a figure's name ends in, ``"at least"`` or ``"at most"``, and the bar.
Bar = tuple[str, str, float]


def verdicts(figures: Mapping[str, float], bars: Sequence[Bar]) -> dict[str, dict[str, object]]:
    """Every bar that applies to a figure, and whether it holds."""
    return {
        name: {"bar": f"{sense} {bar}", "ok": value >= bar if sense == "at least" else value <= bar}
        for name, value in figures.items()
        for ending, sense, bar in bars
        if name.endswith(ending)
    }
