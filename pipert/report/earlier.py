"""What an earlier run left in the output folder is kept beside the new run's results, never written over."""

from __future__ import annotations

from pathlib import Path

#: What a run writes into its output folder.
RESULTS = ("metrics.jsonl", "pipeline.svg", "pipeline.png", "pipeline.trace.json")


def keep_earlier(folder: Path) -> Path | None:
    """Move an earlier run's results into a folder of their own: ``earlier-1`` in theirs, then ``earlier-2``.

    Args:
        folder: the output folder; it need not exist.

    Returns:
        where they are now; None if there were none.
    """
    left = [path for name in RESULTS if (path := folder / name).exists()]
    if not left:
        return None
    taken = [int(number) for path in folder.glob("earlier-*") if (number := path.name.rpartition("-")[2]).isdigit()]
    kept = folder / f"earlier-{max(taken, default=0) + 1}"
    kept.mkdir()
    for path in left:
        path.rename(kept / path.name)
    return kept
