"""Configurations are checked whole, and every fault is named with its key, the rule and the remedy."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.config import Config, load_config, parse_config
from pipert.errors import ConfigError

EXAMPLES = Path(__file__).parent.parent / "examples" / "configs"

MINIMAL: dict[str, Any] = {
    "model": {"layers": 8, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 256},
    "data": {"global_batch": 16},
    "run": {"steps": 10},
}


def parsed(*overrides: str, **sections: dict[str, Any]) -> Config:
    settings = copy.deepcopy(MINIMAL)
    for name, keys in sections.items():
        settings.setdefault(name, {}).update(keys)
    return parse_config(settings, overrides)


def test_a_searched_schedule_has_as_many_stages_as_it_is_told() -> None:
    assert parsed(parallel={"pp": 4, "chunks": 2, "schedule": "auto", "in_flight": 3}).parallel.in_flight == 3
    with pytest.raises(ConfigError, match=r"parallel\.pp 4 × parallel\.chunks 3 = 12 stages"):
        parsed(parallel={"pp": 4, "chunks": 3, "schedule": "auto"})


def test_a_minimal_configuration_has_defaults_for_the_rest() -> None:
    config = parsed()
    assert (config.parallel.world, config.microbatches, config.tokens_per_step) == (1, 16, 256)
    assert config.data.tokenizer == "bytes"
    assert config == parsed()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = config.model  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("model", {"vocabluary": 1}, r"model\.vocabluary: unknown key; did you mean vocabulary\?"),
        ("parallel", {"micro_bach": 2}, r"parallel\.micro_bach: unknown key; did you mean micro_batch\?"),
        ("model", {"lr": 0.1}, r"model\.lr: unknown key; did you mean optimizer\.lr\?"),
        ("run", {"zzz": 1}, r"run\.zzz: unknown key$"),
        ("paralel", {"pp": 2}, r"paralel: unknown section; did you mean parallel\?"),
        ("model", {"heads": "4"}, r"model\.heads is '4'; it should be a valid integer"),
        ("model", {"layers": 8.0}, r"model\.layers is 8\.0; it should be a valid integer"),
        ("model", {"bias": 1}, r"model\.bias is 1; it should be a valid boolean"),
        ("model", {"norm": "batch"}, r"model\.norm is 'batch'; it should be 'layernorm' or 'rmsnorm'"),
        ("model", {"hidden": 30}, r"model: hidden 30 / heads 4 leaves 2 over"),
        ("run", {"steps": 0}, r"run\.steps is 0; it should be greater than or equal to 1"),
        ("optimizer", {"lr": float("nan")}, r"optimizer\.lr is nan"),
        ("optimizer", {"beta2": 1.0}, r"optimizer\.beta2 is 1\.0; it should be less than 1"),
        ("data", {"text": "book.txt"}, r"data\.text is 'book\.txt'; it should be a list: \['book\.txt'\]"),
        (
            "parallel",
            {"pp": 6, "schedule": "zb-v"},
            r"parallel\.schedule zb-v with parallel\.pp 6 has 12 stages for model\.layers 8; .* use pp <= 4 or another",
        ),
        ("data", {"text": [3]}, r"data\.text\.0 is 3; it should be a valid string"),
        ("parallel", {"schedule": "1f1c"}, r"parallel\.schedule: no schedule is called '1f1c'; did you mean '1f1b'"),
        ("parallel", {"pp": 4, "in_flight": 3}, r"parallel\.in_flight 3 .*schedule is 1f1b; leave it out"),
        ("parallel", {"pp": 4, "chunks": 2}, r"parallel\.schedule: 1f1b puts one stage on a rank"),
        (
            "parallel",
            {"pp": 4, "chunks": 3, "schedule": "interleaved"},
            r"parallel\.pp 4 × parallel\.chunks 3 = 12 stages for model\.layers 8; .* use chunks <= 2",
        ),
        ("parallel", {"pp": 16}, r"= 16 stages for model\.layers 8; .* use pp <= 8"),
        (
            "parallel",
            {"dp": 3, "micro_batch": 2},
            r"data\.global_batch 16 / \(parallel\.dp 3 × parallel\.micro_batch 2\) = 2\.667 micro-batches.* 12 or 18",
        ),
        ("parallel", {"micro_batch": 32}, r"= 0\.5 micro-batches, not a whole number; use global_batch 32"),
        ("parallel", {"tp": 3}, r"parallel\.tp 3: heads 4 / tp 3 leaves 1 over; tp must divide the heads"),
        (
            "parallel",
            {"pp": 2, "vocabulary": "spread", "zero": 2},
            r"vocabulary \"spread\" with parallel\.zero 2: .*zero = 1",
        ),
        ("schedule", {"warmup": 11}, r"schedule\.warmup 11 is longer than run\.steps 10"),
        ("schedule", {"warmup": 5, "length": 5}, r"schedule\.length 5 ends within schedule\.warmup 5"),
        ("model", {"vocabulary": 61}, r"model\.vocabulary 61 is too small for data\.tokenizer bytes; use 256"),
    ],
)
def test_a_fault_is_named_with_its_key(section: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**{section: keys})


def test_all_faults_are_named_at_once_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[model]\nlayers = 8\nheds = 4\n[run]\nsteps = 'ten'\n[parallel]\npp = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["optimizer.lr=-1"])
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path} with optimizer.lr=-1:"
    starts = ["data.global_batch is missing", "model.heads is missing", "model.heds: unknown key; did you mean heads?"]
    starts += ["optimizer.lr is -1", "parallel.pp is 0", "run.steps is 'ten'"]
    assert all(any(line.strip().startswith(start) for line in lines) for start in starts)


def test_a_section_that_is_no_section_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model is 3; it must be a section: \[model\]"):
        parse_config({**MINIMAL, "model": 3})


def test_a_file_that_cannot_be_read_or_is_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file"):
        load_config(tmp_path / "nowhere.toml")
    (tmp_path / "x.toml").write_text("[model\nlayers = 1")
    with pytest.raises(ConfigError, match=r"x\.toml is not TOML: .*line 1"):
        load_config(tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("parallel.pp=4", "parallel", "pp", 4),
        ("optimizer.lr = 1e-3", "optimizer", "lr", 1e-3),
        ("data.split=range", "data", "split", "range"),
        ('data.split="range"', "data", "split", "range"),
        ("model.bias=false", "model", "bias", False),
        ("data.text=['a', 'b']", "data", "text", ("a", "b")),
        ("run.output=runs/a=b", "run", "output", "runs/a=b"),
        ("run.output=", "run", "output", ""),
    ],
)
def test_the_command_line_wins(override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(parsed(override), section), key) == value


@pytest.mark.parametrize("override", ["steps=3", "run.steps", "run.", "=3", "run.=3", ".steps=3"])
def test_what_is_no_setting_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"write section\.key=value"):
        parsed(override)


def test_the_mark_and_line_ends_of_a_windows_editor_do_not_matter(tmp_path: Path) -> None:
    text = (EXAMPLES / "tiny.toml").read_text(encoding="utf-8")
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_config(tmp_path / "x.toml") == load_config(EXAMPLES / "tiny.toml")


def test_the_command_line_is_checked_like_the_file() -> None:
    with pytest.raises(
        ConfigError, match=r"configuration with run\.stps=3:\n  run\.stps: unknown key; did you mean steps"
    ):
        parsed("run.stps=3")


@given(
    pp=st.integers(1, 10),
    dp=st.integers(1, 6),
    size=st.integers(1, 6),
    batch=st.integers(1, 40),
    layers=st.integers(1, 8),
)
def test_a_layout_is_accepted_exactly_when_it_comes_out_even(
    pp: int, dp: int, size: int, batch: int, layers: int
) -> None:
    sections = {"model": {"layers": layers}, "data": {"global_batch": batch}}
    sections["parallel"] = {"pp": pp, "dp": dp, "micro_batch": size}
    if pp <= layers and batch % (dp * size) == 0:
        config = parsed(**sections)
        assert config.microbatches * dp * size == batch
    else:
        with pytest.raises(ConfigError):
            parsed(**sections)


@pytest.mark.parametrize(
    ("name", "billions", "ranks"),
    [
        ("tiny", 0.0008, 4),
        ("tiny-3d", 0.0008, 8),
        ("small", 0.0091, 4),
        ("gpt2-124m", 0.124, 8),
        ("22b", 22, 64),
        ("175b", 175, 1024),
        ("1t", 1000, 3072),
    ],
)
def test_the_example_has_the_size_and_ranks_in_its_name_and_comment(name: str, billions: float, ranks: int) -> None:
    config = load_config(EXAMPLES / f"{name}.toml")
    assert config.model.parameters / 1e9 == pytest.approx(billions, rel=0.05)
    assert config.parallel.world == ranks
    assert f"{ranks:,} ranks" in (EXAMPLES / f"{name}.toml").read_text()


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == {
        "tiny",
        "tiny-3d",
        "small",
        "gpt2-124m",
        "22b",
        "175b",
        "1t",
    }
