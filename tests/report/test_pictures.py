"""Measured and predicted timelines become one picture, as SVG and PNG, and one trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from pipert.report.pictures import save_pictures, save_png
from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.draw.palette import colour
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline


def simulated(name: str, microbatches: int = 4) -> Timeline:
    return simulate(generate("1f1b", 2, microbatches), Costs(0.01, 0.02)).named(name)


def test_the_files_are_what_their_endings_say_and_hold_both_timelines(tmp_path: Path) -> None:
    paths = save_pictures(simulated("measured"), simulated("predicted"), folder=tmp_path / "deep")
    assert [path.name for path in paths] == ["pipeline.svg", "pipeline.png", "pipeline.trace.json"]
    texts = {text for element in ElementTree.parse(paths[0]).iter() for text in [element.text] if text}
    assert {"measured", "predicted", "rank 1"} <= texts
    assert any("1F0" in text for text in texts)
    assert Image.open(paths[1]).format == "PNG"
    events = json.loads(paths[2].read_text())["traceEvents"]
    assert {(event["pid"], event["name"]) for event in events} >= {(0, "0F0"), (0, "1B3"), (1, "1B3")}


def test_a_png_grows_with_its_ranks_and_takes_thousands_of_actions(tmp_path: Path) -> None:
    save_png(simulated("one"), path=tmp_path / "1.png")
    save_png(simulated("one"), simulated("long", 1500), path=tmp_path / "2.png")
    one, two = (Image.open(tmp_path / f"{number}.png").size for number in (1, 2))
    assert two[0] == one[0] and two[1] > 1.5 * one[1]


def test_drawing_needs_no_display_and_leaves_pyplot_alone() -> None:
    program = "import sys, pipert.report.pictures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_a_png_tells_the_stages_of_a_rank_apart_by_lightness(tmp_path: Path) -> None:
    path = tmp_path / "chunks.png"
    save_png(simulate(generate("interleaved", 2, 4, 2), Costs(0.01, 0.02)), path=path)
    found = np.unique(np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3), axis=0)
    pixels = {"#" + "".join(f"{level:02x}" for level in pixel) for pixel in found.tolist()}
    assert {colour(kind, stage) for kind in (Kind.F, Kind.B) for stage in (0.0, 1.0)} <= pixels
