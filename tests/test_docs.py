"""What the documents say is there and works: links, commands, make targets, code, benchmarks behind numbers."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import pipert
from pipert.cli import build
from pipert.cli.lazy import LazyCommand

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NUMBER = re.compile(r"\d[\d.,]*\s*(%|×|x\b|µs|us\b|ms\b|s\b|min\b|[kMGT]i?B|tokens)")


def tokens(path: Path) -> list[Token]:
    """The document's tokens, those inside paragraphs and cells included."""
    flat: list[Token] = []
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text()):
        flat += [token, *(token.children or [])]
    return flat


def block_lines(path: Path) -> Iterator[str]:
    """The lines of its code blocks, without prompts and comments."""
    for token in tokens(path):
        if token.type in ("fence", "code_block") and token.info in ("", "sh", "bash", "shell", "console"):
            for line in token.content.replace("\\\n", " ").splitlines():
                yield re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))


def inline_code(path: Path) -> Iterator[str]:
    return (token.content for token in tokens(path) if token.type == "code_inline")


def commands(first: str) -> list[Any]:
    """Every line of a code block that calls this program, with its document."""
    return [
        pytest.param(line, id=f"{path.name}: {line}")
        for path in DOCUMENTS
        for line in block_lines(path)
        if line.split(" ")[0] == first
    ]


def mentions(first: str) -> list[Any]:
    """Every `code` in running text that calls this program."""
    return [
        pytest.param(code, id=f"{path.name}: {code}")
        for path in DOCUMENTS
        for code in inline_code(path)
        if code.split(" ")[0] == first
    ]


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The sub-command that these words name, and the words left for it."""
    command: Any = build()
    while words and hasattr(command, "get_command"):
        child = command.get_command(None, words[0])
        if child is None:
            break
        command = child.load() if isinstance(child, LazyCommand) else child
        words = words[1:]
    return command, words


def test_there_are_documents() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {path.name for path in DOCUMENTS}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_picture_leads_to_a_file(path: Path) -> None:
    targets = [str(token.attrs.get("href") or token.attrs.get("src") or "") for token in tokens(path)]
    local = [target.split("#")[0] for target in targets if target and not re.match(r"https?://|#|mailto:", target)]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("line", commands("pipert"))
def test_every_pipert_command_is_understood(line: str) -> None:
    command, words = find_command(shlex.split(line.split(" > ")[0].split(" | ")[0])[1:])
    if words and words[0] in ("--version", "--help"):
        return
    command.make_context("pipert", words)  # a wrong option, value or missing argument raises


def shown(path: Path) -> list[Any]:
    """Every command of a console block that has its output below it, with that output."""
    blocks = [token.content for token in tokens(path) if token.type == "fence" and token.info == "console"]
    calls = [call.split("\n", 1) for block in blocks for call in block.split("$ ")[1:]]
    return [pytest.param(line, output, id=line) for line, output in calls if output]


@pytest.mark.parametrize(("line", "output"), shown(ROOT / "README.md"))
def test_the_readme_shows_what_is_printed(line: str, output: str, tmp_path: Path) -> None:
    call = [sys.executable, "-m", *shlex.split(line)]
    environ = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(call, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, output)


@pytest.mark.parametrize("code", mentions("pipert"))
def test_every_pipert_command_in_running_text_exists(code: str) -> None:
    command, words = find_command(code.split()[1:])
    names = set(getattr(command, "commands", ()))
    assert not (names and words and words[0].isalpha()), f"no such command; there are {sorted(names)}"


@pytest.mark.parametrize("line", commands("make") + mentions("make"))
def test_every_make_target_exists(line: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    words = [word for word in shlex.split(line)[1:] if "=" not in word]
    assert set(words) <= targets


def python_blocks() -> list[Any]:
    return [
        pytest.param(token.content, id=f"{path.name}:{token.map[0] if token.map else 0}")
        for path in DOCUMENTS
        for token in tokens(path)
        if token.type == "fence" and token.info == "python"
    ]


@pytest.mark.parametrize("code", python_blocks())
def test_every_python_block_parses_and_uses_names_that_exist(code: str) -> None:
    tree = ast.parse(code)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pipert"
    }
    assert used <= set(pipert.__all__)
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(body=list(imports), type_ignores=[]), "<document>", "exec"), {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_table_of_measurements_names_its_benchmark(path: Path) -> None:
    parsed = MarkdownIt("commonmark").enable("table").parse(path.read_text())
    lines = path.read_text().splitlines()
    for token in parsed:
        if token.type != "table_open" or token.map is None:
            continue
        begin, end = token.map
        if not NUMBER.search("\n".join(lines[begin:end])):
            continue
        nearby = "\n".join(lines[max(0, begin - 6) : end + 4])
        scripts = re.findall(r"benchmarks/\w+\.py", nearby)
        assert scripts, f"{path.name}:{begin + 1}: this table says not which benchmark prints its numbers"
        assert all((ROOT / script).exists() for script in scripts)
