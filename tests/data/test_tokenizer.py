"""Tokenizers go round, and say who they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.data import ByteTokenizer, open_tokenizer
from pipert.errors import DataError


@given(text=st.text())
def test_bytes_go_round(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_that_are_no_text_do_not_raise() -> None:
    assert ByteTokenizer().decode([104, 105, 255]) == "hi\ufffd"
    assert ByteTokenizer().decode(np.array([104, 0])) == "h\0"
    assert ByteTokenizer().decode([104, 256, -1, 105]) == "h\ufffd\ufffdi"  # a model's vocabulary may be larger
    assert ByteTokenizer().encode("\ud800").tolist() == [ord("?")]


def test_the_byte_tokenizer_is_opened_by_name() -> None:
    tokenizer = open_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocabulary, tokenizer.end_of_text) == ("bytes", 256, 0)


def word_level(path: Path, *words: str) -> Path:
    """A tokenizer.json that knows some words."""
    model = {"type": "WordLevel", "vocab": {word: index for index, word in enumerate(words)}, "unk_token": words[0]}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    path.write_text(json.dumps(whole))
    return path


def test_a_hugging_face_tokenizer_is_opened_by_its_path(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = word_level(tmp_path / "tokenizer.json", "?", "</s>", "to", "be", "or")
    tokenizer = open_tokenizer(str(path))
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (5, 1)
    ids = tokenizer.encode("to be or not to be")
    assert ids.tolist() == [2, 3, 4, 0, 2, 3]
    assert tokenizer.decode(ids[:3]) == "to be or"
    other = word_level(tmp_path / "other.json", "?", "</s>", "be", "to")
    assert open_tokenizer(str(other)).fingerprint != tokenizer.fingerprint


def test_a_hugging_face_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = word_level(tmp_path / "tokenizer.json", "?", "to")
    with pytest.raises(DataError, match=r"no end-of-text token; add one of <\|endoftext\|>"):
        open_tokenizer(str(path))


def test_a_tokenizer_that_is_no_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=r"No such file.*tokenizer\.json"):
        open_tokenizer(str(tmp_path / "byte"))


def test_a_missing_tokenizers_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'pipert\[tokenizers\]'"):
        open_tokenizer("some/tokenizer.json")
