"""Token files go round, appear whole or not at all, and are refused when a byte has changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipert.data import ByteTokenizer, TokenFile, TokenWriter, open_tokens
from pipert.errors import DataError


class Wide(ByteTokenizer):
    """A tokenizer with as large a vocabulary as asked for."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary


def write(path: Path, *pieces: list[int], vocabulary: int = 256) -> TokenFile:
    with TokenWriter(path, Wide(vocabulary), "a recipe") as writer:
        for piece in pieces:
            writer.append(np.array(piece, dtype=np.int64))
    return open_tokens(path)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (128_256, "uint32")]
)
def test_ids_go_round_in_the_smallest_type_that_holds_them(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    ids = [0, vocabulary - 1, vocabulary // 2]
    file = write(tmp_path / "deep" / "x.tokens", ids[:2], [], ids[2:], vocabulary=vocabulary)
    assert file.tokens.tolist() == ids
    assert file.header.dtype == dtype
    assert (file.header.tokens, file.header.vocabulary, file.header.recipe) == (3, vocabulary, "a recipe")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.tokens"]


def test_a_file_is_mapped_and_read_only(tmp_path: Path) -> None:
    file = write(tmp_path / "x", [1, 2, 3])
    assert isinstance(file.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 5


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    write(tmp_path / "x", [1, 2, 3])
    assert open_tokens(str(tmp_path / "x")).tokens.tolist() == [1, 2, 3]


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    assert write(tmp_path / "x").tokens.tolist() == []


def test_the_same_ids_have_the_same_checksum_however_they_were_written(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1", [1, 2], [3]), write(tmp_path / "2", [1], [2, 3])
    assert one.header.payload == two.header.payload != write(tmp_path / "3", [3, 2, 1]).header.payload


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_anywhere_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x"
    write(path, list(range(200)))
    content = bytearray(path.read_bytes())
    text = content.index(b" " * 64)  # where the header is padding only
    place = data.draw(st.one_of(st.integers(0, text), st.integers(0, len(content) - 1)))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged|not a token file|format"):
        open_tokens(path)


@pytest.mark.parametrize("length", [0, 5, 4095, 4096, 4097, 4295, 4297])
def test_another_length_is_refused_also_without_reading_everything(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x"
    write(path, list(range(200)))
    path.write_bytes((path.read_bytes() + b"\0")[:length])
    with pytest.raises(DataError, match=r"damaged|not a token file"):
        open_tokens(path, verify=False)


def test_a_file_of_a_later_format_or_another_kind_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path, [1])
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(DataError, match="format 2, and this pipert reads 1; build it again"):
        open_tokens(path)
    np.save(tmp_path / "y.npy", np.arange(9))
    with pytest.raises(DataError, match=r"y\.npy is not a token file"):
        open_tokens(tmp_path / "y.npy")
    with pytest.raises(DataError, match="No such file"):
        open_tokens(tmp_path / "z")
    with pytest.raises(DataError, match="Is a directory"):
        open_tokens(tmp_path)


def test_a_file_that_was_not_finished_leaves_nothing_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path, [1, 2])
    with pytest.raises(ZeroDivisionError), TokenWriter(path, ByteTokenizer()) as writer:
        writer.append(np.array([3]))
        raise ZeroDivisionError
    assert open_tokens(path).tokens.tolist() == [1, 2]
    assert [found.name for found in tmp_path.iterdir()] == ["x"]


def test_two_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with TokenWriter(path, ByteTokenizer()) as one, TokenWriter(path, ByteTokenizer()) as two:
        one.append(np.array([1, 1]))
        two.append(np.array([2]))
        one.append(np.array([1]))
    assert open_tokens(path).tokens.tolist() == [1, 1, 1]


@pytest.mark.parametrize("ids", [[256], [-1], [3, 300, 4]])
def test_ids_outside_of_the_vocabulary_are_refused(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(DataError, match="for a vocabulary of 256"):
        write(tmp_path / "x", ids)
    assert not list(tmp_path.iterdir())
