"""A corpus is the same tokens on every machine, made once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipert.data import ByteTokenizer, Corpus, open_tokens, prepare_corpus, standard_library, text_files
from pipert.errors import DataError


def texts(folder: Path, count: int = 40) -> Path:
    for index in range(count):
        path = folder / f"d{index % 3}" / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {index}\n")
    return folder


def test_files_come_in_the_order_of_their_names_without_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("z.txt", "b/a.txt", "a.txt", ".hidden", "b/.git"):
        (tmp_path / name).write_text(name)
    assert [name for name, _ in text_files(tmp_path)] == ["a.txt", "b/a.txt", "z.txt"]
    assert [name for name, _ in text_files(tmp_path / "z.txt", tmp_path / "b")] == ["z.txt", "a.txt"]
    with pytest.raises(DataError, match="no file or folder"):
        text_files(tmp_path / "nowhere")


def test_every_text_is_there_once_followed_by_its_end(tmp_path: Path) -> None:
    corpus = Corpus(text_files(texts(tmp_path / "in")), heldout=0.3)
    file = prepare_corpus(corpus, ByteTokenizer(), tmp_path / "out")
    assert file.tokens[-1] == 0
    train, heldout = (set(bytes(part).split(b"\0")[:-1]) for part in (file.train, file.heldout))
    assert not train & heldout
    assert train | heldout == {f"text {index}\n".encode() for index in range(40)}
    assert 4 <= len(heldout) <= 20


def test_the_division_depends_on_names_only(tmp_path: Path) -> None:
    one, two = (
        prepare_corpus(Corpus(text_files(texts(tmp_path / place))), ByteTokenizer(), tmp_path / f"{place}-out")
        for place in ("here", "elsewhere")
    )
    assert one.header.payload == two.header.payload
    assert one.header.heldout_from == two.header.heldout_from


def test_a_split_by_range_holds_out_the_end(tmp_path: Path) -> None:
    corpus = Corpus(text_files(texts(tmp_path / "in")), heldout=0.25, split="range")
    file = prepare_corpus(corpus, ByteTokenizer(), tmp_path)
    assert len(file.heldout) == round(len(file.tokens) / 4)
    assert bytes(file.tokens).startswith(b"text 0\n\0text 3\n\0")


def test_the_file_is_made_once_and_again_when_a_text_changes(tmp_path: Path) -> None:
    folder = texts(tmp_path / "in")

    def made() -> list[str]:
        prepare_corpus(Corpus(text_files(folder)), ByteTokenizer(), tmp_path / "out")
        return sorted(path.name for path in (tmp_path / "out").iterdir())

    first = made()
    (tmp_path / "out" / first[0]).touch()
    assert made() == first
    os.utime(folder / "d0" / "00.txt", (1, 1))
    assert len(made()) == 2
    assert open_tokens(tmp_path / "out" / first[0]).tokens.size


def test_a_damaged_file_is_refused_not_rebuilt_in_silence(tmp_path: Path) -> None:
    corpus = Corpus(text_files(texts(tmp_path / "in")))
    path = prepare_corpus(corpus, ByteTokenizer(), tmp_path).path
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged.*delete it"):
        prepare_corpus(corpus, ByteTokenizer(), tmp_path)


def test_bytes_that_are_not_utf_8_and_line_ends_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\r\ntwo\xff\n")
    corpus = Corpus(text_files(tmp_path / "a"), heldout=0.0)
    file = prepare_corpus(corpus, ByteTokenizer(), tmp_path / "out")
    assert bytes(file.train) == b"one\r\ntwo\xef\xbf\xbd\n\0"
    assert len(file.heldout) == 0


def test_the_standard_library_is_there_in_a_fixed_order_without_tests_and_packages() -> None:
    names = [name for name, _ in standard_library()]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "site-packages"))
    corpus = Corpus(standard_library())
    train, heldout = corpus.divided()
    assert 0.02 < len(heldout) / len(names) < 0.08
    assert len(train) + len(heldout) == len(names)


def test_what_cannot_be_divided_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without any text file"):
        Corpus(())
    (tmp_path / "a").write_text("x")
    documents = text_files(tmp_path / "a")
    with pytest.raises(DataError, match=r"heldout is 1\.0"):
        Corpus(documents, heldout=1.0)
    with pytest.raises(DataError, match=r'1 files with heldout 0\.05 leave 1 to train on and 0 held out.*"range"'):
        prepare_corpus(Corpus(documents), ByteTokenizer(), tmp_path)
    with pytest.raises(DataError, match="split is 'half'; choose one of file, range"):
        Corpus(documents, split="half")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"heldout is '0\.1'"):
        Corpus(documents, heldout="0.1")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"folder .*a cannot be made \(File exists\); name one for token files"):
        prepare_corpus(Corpus(documents, heldout=0.0), ByteTokenizer(), tmp_path / "a")
    (tmp_path / "a").unlink()
    with pytest.raises(DataError, match="No such file"):
        prepare_corpus(Corpus(documents, heldout=0.0), ByteTokenizer(), tmp_path)
