"""Pictures: the familiar ones as text, character by character, and SVG documents that hold what they should."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.draw.palette import colour, is_light
from pipert.scheduler.draw.svg import svg
from pipert.scheduler.draw.text import text
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.interleaved import interleaved
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline
from tests.scheduler.hand_written import schedule
from tests.scheduler.layouts import schedules

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "schedules.svg"

SVG = "{http://www.w3.org/2000/svg}"


# ---- text ----


def test_1f1b_over_time_is_the_familiar_picture() -> None:
    assert text(simulate(one_f_one_b(4, 8), Costs(1, 2)), width=80) == (
        "rank 0 │F0F1F2F3············B0━━F4B1━━F5B2━━F6B3━━F7B4━━··B5━━··B6━━··B7━━│\n"
        "rank 1 │··F0F1F2········B0━━F3B1━━F4B2━━F5B3━━F6B4━━F7B5━━··B6━━··B7━━····│\n"
        "rank 2 │····F0F1····B0━━F2B1━━F3B2━━F4B3━━F5B4━━F6B5━━F7B6━━··B7━━········│\n"
        "rank 3 │······F0B0━━F1B1━━F2B2━━F3B3━━F4B4━━F5B5━━F6B6━━F7B7━━············│\n"
        "        0                                                               33"
    )


def test_halves_of_the_backward_look_different() -> None:
    assert text(simulate(schedule("0", 1, "0F0 0I0 0W0"), Costs(2, 4)), width=40).splitlines()[0] == (
        "rank 0 │F0──────I0══════W0~~~~~~│"
    )


def test_a_schedule_in_order_shows_every_action() -> None:
    assert text(interleaved(2, 2, 2)) == (
        "rank 0 │0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nrank 1 │1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )


def test_a_program_in_order_shows_messages_too() -> None:
    drawn = text(lower(one_f_one_b(2, 1), MPI, prefetch=0))
    assert drawn.splitlines()[0] == "rank 0 │0F0      0SEND_F0 0RECV_B0 0B0"


def test_what_does_not_fit_is_cut_and_marked() -> None:
    lines = text(gpipe(2, 500), width=60).splitlines()
    assert all(len(line) <= 60 and line.endswith("…") for line in lines)


@given(schedules(ranks=12, microbatches=20), st.integers(20, 200))
def test_pictures_keep_to_their_width_and_have_a_line_for_every_rank(made: Schedule, width: int) -> None:
    drawn = text(made, width=width).splitlines()
    over_time = text(simulate(made, Costs(0.123, 0.251, comm=0.003)), width=width).splitlines()
    assert len(drawn) == made.num_ranks
    assert len(over_time) == made.num_ranks + 1
    assert max(map(len, [*drawn, *over_time])) <= width
    assert len({len(line) for line in over_time[:-1]}) == 1


@given(schedules(ranks=4, microbatches=8))
def test_colours_change_nothing_but_the_colour(made: Schedule) -> None:
    for target in (made, simulate(made, Costs(1, 2))):
        coloured = text(target, colours=True)
        assert "\x1b[" in coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == text(target)


def test_empty_rows_and_instant_actions_are_drawn() -> None:
    assert text(schedule("0 1", 1, "", "")) == "rank 0 │\nrank 1 │"
    instant = simulate(one_f_one_b(2, 2), Costs(0, 0))
    assert text(instant, width=20).startswith("rank 0 │··········")
    assert svg(instant)


# ---- SVG ----


def boxes(document: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(document).iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]


@given(schedules(ranks=4, chunks=3, microbatches=8))
def test_an_svg_has_a_box_for_every_action_where_and_as_wide_as_it_should_be(made: Schedule) -> None:
    timeline = simulate(made, Costs(1, 2, comm=0.5))
    found = boxes(svg(timeline, width=2000))
    assert len(found) == len(timeline)
    scale = (2000 - 78 - 82) / timeline.makespan
    for box, (_, action, start, end) in zip(found, timeline, strict=True):
        assert box[0].text is not None
        assert box[0].text.startswith(str(action))
        assert float(box.attrib["x"]) == pytest.approx(78 + start * scale, abs=0.01)
        assert float(box.attrib["width"]) == pytest.approx((end - start) * scale, abs=1)


def test_messages_and_reductions_are_strips_under_the_boxes() -> None:
    timeline = simulate(lower(one_f_one_b(2, 2), MPI, reduce=True), Costs(1, 2, comm=0.2, reduce=1))
    found = {(box[0].text or "").split()[0]: box for box in boxes(svg(timeline))}
    assert len(found) == 4 + 4 + 4 + 2  # forwards and backwards, sends, reductions; receives would say the same again
    assert float(found["0REDUCE"].attrib["height"]) < float(found["0F0"].attrib["height"])
    assert float(found["0REDUCE"].attrib["y"]) > float(found["0F0"].attrib["y"])


def test_several_timelines_share_one_axis_and_start_at_zero() -> None:
    predicted = simulate(one_f_one_b(2, 2), Costs(1, 2)).named("predicted")
    late = Timeline("measured", predicted.offsets, predicted.codes, predicted.starts + 50, predicted.ends + 50)
    document = svg(predicted, late)
    words = [one.text for one in ElementTree.fromstring(document).iter(f"{SVG}text")]
    assert [word for word in words if word in ("predicted", "measured")] == ["predicted", "measured"]
    at = [box.attrib["x"] for box in boxes(document)]
    assert at[: len(at) // 2] == at[len(at) // 2 :]
    assert [word for word in words if word and word.isdigit() and int(word) > 9] == []


def test_times_in_seconds_are_shown_in_the_unit_that_suits() -> None:
    for factor, unit in ((10.0, "s"), (1e-2, "ms"), (1e-6, "µs")):
        timeline = simulate(one_f_one_b(2, 2), Costs(factor, 2 * factor))
        assert re.search(rf"makespan [\d.]+ {unit} ", svg(timeline, unit="s"))


def test_a_schedule_is_drawn_with_a_backward_of_two_forwards() -> None:
    assert svg(one_f_one_b(4, 8)) == svg(simulate(one_f_one_b(4, 8), Costs(1, 2)))
    assert "bubble 15.8%" in svg(interleaved(4, 8, 2))


def test_the_picture_in_the_documents_is_what_is_drawn_today() -> None:
    shown = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1)]
    drawn = svg(*(generate(name, 4, 8, chunks) for name, chunks in shown))
    assert PICTURE.read_text(encoding="utf-8") == drawn, f"write svg(...) of these schedules to {PICTURE}"


def test_a_legend_of_many_kinds_stays_within_the_picture() -> None:
    program = lower(interleaved(2, 3, 2), MPI, reduce=True, zero=3, early=True, meta=[0])
    for width in (200, 960):
        root = ElementTree.fromstring(svg(simulate(program, Costs(1, 2, comm=0.2, reduce=1, gather=1)), width=width))
        for box in root.iter(f"{SVG}rect"):
            assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
            assert float(box.attrib["y"]) + float(box.attrib["height"]) <= float(root.attrib["height"])


def test_a_drawing_of_nothing_is_empty() -> None:
    assert text(Schedule("nothing", Placement.linear(2), 1, ())) == ""


def test_names_are_escaped() -> None:
    document = svg(simulate(one_f_one_b(1, 1), Costs(1, 2)).named("a < b & c"))
    assert any(one.text == "a < b & c" for one in ElementTree.fromstring(document).iter(f"{SVG}text"))


def test_a_large_timeline_stays_a_small_picture() -> None:
    document = svg(one_f_one_b(8, 1024))
    assert len(document) < 3_000_000
    assert "<title>" not in document


@pytest.mark.parametrize("kind", list(Kind))
def test_labels_can_be_read_on_every_shade(kind: Kind) -> None:
    for stage in (0.0, 0.5, 1.0):
        for microbatch in (0.0, 0.5, 1.0):
            fill = colour(kind, stage, microbatch)
            levels = [int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5)]
            linear = [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in levels]
            luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
            ink = 0.011 if is_light(fill) else 1.0
            assert (max(luminance, ink) + 0.05) / (min(luminance, ink) + 0.05) > 2.4
