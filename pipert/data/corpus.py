"""Text files to one token file, with a part held out for evaluation."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from pipert.data.token_file import TokenFile, TokenWriter, open_tokens
from pipert.data.tokenizer import Tokenizer
from pipert.errors import DataError

Split = Literal["file", "range"]

_NO_SOURCES = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")


@dataclass(frozen=True)
class Corpus:
    """Text files, and how to divide them.

    Attributes:
        documents: (name, path) of each text, in the order in which they are tokenized. Names do not depend on where
            the files lie, so the division is the same on every machine.
        heldout: share that is held out for evaluation, ``0 <= heldout < 1``.
        split: hold out whole files, chosen by a hash of their names; or the end of the token sequence.
    """

    documents: tuple[tuple[str, Path], ...]
    heldout: float = 0.05
    split: Split = "file"

    def __post_init__(self) -> None:
        if not self.documents:
            raise DataError("a corpus without any text file; give files or folders that hold some")
        if not isinstance(self.heldout, (int, float)) or not 0.0 <= self.heldout < 1.0:
            raise DataError(f"heldout is {self.heldout!r}; it must be at least 0 and below 1")
        if self.split not in get_args(Split):
            raise DataError(f"split is {self.split!r}; choose one of {', '.join(get_args(Split))}")

    def divided(self) -> tuple[list[tuple[str, Path]], list[tuple[str, Path]]]:
        """Documents to train on and documents held out (none where the split is by range)."""
        parts: tuple[list[tuple[str, Path]], list[tuple[str, Path]]] = ([], [])
        for document in self.documents:
            draw = int.from_bytes(blake2b(document[0].encode(), digest_size=8).digest(), "little") / 2**64
            parts[self.split == "file" and draw < self.heldout].append(document)
        if self.split == "file" and self.heldout and not all(parts):
            raise DataError(
                f"{len(self.documents)} files with heldout {self.heldout} leave {len(parts[0])} to train on and "
                f'{len(parts[1])} held out; use split = "range", more files, or another share'
            )
        return parts

    def recipe(self, tokenizer: Tokenizer) -> str:
        """A name for the token file made from this: changes when a file's name, size or time does."""
        digest = blake2b(digest_size=16)
        digest.update(repr((tokenizer.fingerprint, self.heldout, self.split)).encode())
        for name, path in self.documents:
            state = path.stat()
            digest.update(repr((name, state.st_size, state.st_mtime_ns)).encode())
        return digest.hexdigest()


def prepare_corpus(corpus: Corpus, tokenizer: Tokenizer, folder: str | Path) -> TokenFile:
    """The token file of a corpus: the one in ``folder`` if it was made before, or else a new one there.

    Every text is followed by the tokenizer's end-of-text. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        DataError: a text cannot be read, the folder cannot be made or written, nothing would be left to train on or to
            hold out, or the file in the folder is damaged.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"folder {folder} cannot be made ({error.strerror}); name one for token files") from error
    try:
        recipe = corpus.recipe(tokenizer)
        path = folder / f"{recipe[:16]}.tokens"
        if not path.exists():
            _build(corpus, tokenizer, path, recipe)
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror}; every text of a corpus must be readable, and {folder} writable"
        ) from error
    file = open_tokens(path)
    if file.header.recipe != recipe:
        raise DataError(f"token file {path} was made from other texts; delete it")
    return file


def _build(corpus: Corpus, tokenizer: Tokenizer, path: Path, recipe: str) -> None:
    train, heldout = corpus.divided()
    with TokenWriter(path, tokenizer, recipe) as writer:
        for _, text in train:
            _append(writer, tokenizer, text)
        writer.heldout_from = writer.tokens
        for _, text in heldout:
            _append(writer, tokenizer, text)
        if corpus.split == "range":
            writer.heldout_from = writer.tokens - round(writer.tokens * corpus.heldout)


def _append(writer: TokenWriter, tokenizer: Tokenizer, path: Path) -> None:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        ids = tokenizer.encode(file.read())
    writer.append(np.append(ids, ids.dtype.type(tokenizer.end_of_text)))


def text_files(*places: str | Path) -> tuple[tuple[str, Path], ...]:
    """Documents of a `Corpus`: files, and all files below folders, hidden ones left out, in the order of their names.

    Raises:
        DataError: a place does not exist.
    """
    documents: list[tuple[str, Path]] = []
    for place in map(Path, places):
        if place.is_dir():
            documents += _below(place)
        elif place.is_file():
            documents.append((place.name, place))
        else:
            raise DataError(f"there is no file or folder {str(place)!r} to make a corpus of")
    return tuple(documents)


def standard_library() -> tuple[tuple[str, Path], ...]:
    """Documents of a `Corpus` that every machine has: the sources of Python's standard library, without its tests.

    Raises:
        DataError: this Python was installed without them.
    """
    everything = _below(Path(sysconfig.get_path("stdlib")), without=_NO_SOURCES)
    documents = [(name, path) for name, path in everything if path.suffix == ".py"]
    if not documents:
        raise DataError("this Python has no sources of its standard library; name text files instead")
    return tuple(documents)


def _below(folder: Path, without: Collection[str] = ()) -> list[tuple[str, Path]]:
    """Files below a folder that are not hidden, with their paths from it, sorted; some folders are not entered."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        paths = [Path(place, name) for name in names if not name.startswith(".")]
        found += [(path.relative_to(folder).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)
