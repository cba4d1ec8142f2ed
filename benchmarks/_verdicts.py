"""Whether figures keep the bars that are set for them, and how a benchmark ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

#: What a figure's name ends in, ``"at least"`` or ``"at most"``, and the bar.
Bar = tuple[str, str, float]
#: ``bar``, in words, and whether it is ``ok``.
Verdict = dict[str, object]


def verdicts(figures: Mapping[str, float], bars: Sequence[Bar]) -> dict[str, Verdict]:
    """Every bar that applies to a figure, and whether it holds."""
    return {
        name: {"bar": f"{sense} {bar}", "ok": value >= bar if sense == "at least" else value <= bar}
        for name, value in figures.items()
        for ending, sense, bar in bars
        if name.endswith(ending)
    }


def named(figures: Mapping[str, float], bars: Mapping[str, tuple[str, float]], form: str) -> dict[str, Verdict]:
    """Print all figures, each with its bar if it has one by its whole name, and return the verdicts.

    Args:
        figures: by name.
        bars: sense and bar by the figure's name.
        form: how a name and its value are printed.
    """
    judged: dict[str, Verdict] = {}
    for name, value in figures.items():
        words = ""
        if name in bars:
            sense, bar = bars[name]
            judged |= verdicts({name: value}, [(name, sense, bar)])
            words = f"{sense} {bar}{'' if judged[name]['ok'] else '  MISSED'}"
        print(f"{form.format(name, value)}   {words}".rstrip())
    return judged


def conclude(benchmark: str, figures: Mapping[str, float], bars: Mapping[str, Verdict]) -> int:
    """Print the last line, one JSON object; returns the exit code, 0 when all bars hold."""
    ok = all(verdict["ok"] for verdict in bars.values())
    print(json.dumps({"benchmark": benchmark, "figures": figures, "bars": bars, "ok": ok}))
    return 0 if ok else 1
