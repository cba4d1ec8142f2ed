"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipert.errors import DataError

Ids = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """Text to token ids in ``[0, vocabulary)`` and back.

    Attributes:
        name: what `open_tokenizer` was given.
        vocabulary: number of ids.
        end_of_text: the id put after every document.
        fingerprint: equal for tokenizers that give the same ids; kept in token files.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def vocabulary(self) -> int: ...  # noqa: D102
    @property
    def end_of_text(self) -> int: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102

    def encode(self, text: str) -> Ids:
        """The ids of a text, without an end-of-text."""
        ...

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of some ids; what is no text becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Every byte of the UTF-8 encoding is a token. The end of a text is byte 0, which texts do not contain."""

    name = "bytes"
    vocabulary = 256
    end_of_text = 0
    fingerprint = "bytes-1"

    def encode(self, text: str) -> Ids:
        """The bytes of the text."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of some bytes; ids beyond them (a model's vocabulary may be larger) are no text."""
        known = bytes(token if 0 <= token < 256 else 0xFF for token in map(int, ids))  # 0xFF is in no text
        return known.decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of Hugging Face's `tokenizers` library, which must be installed.

    Args:
        path: the file.

    Raises:
        DataError: the library or the file is missing, or the file is no tokenizer or has no end-of-text token.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                f"tokenizer {str(path)!r} needs the `tokenizers` package; pip install 'pipert[tokenizers]', "
                'or use tokenizer = "bytes"'
            ) from error
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"tokenizer {str(path)!r} cannot be read ({error.strerror}); "
                'give the path of a tokenizer.json, or "bytes"'
            ) from error
        try:
            self._inner = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises nothing more special
            raise DataError(f"tokenizer {str(path)!r} is not a tokenizer.json: {error}") from error
        self.name = str(path)
        self.vocabulary = int(self._inner.get_vocab_size(with_added_tokens=True))
        self.fingerprint = "tokenizers-" + blake2b(content, digest_size=8).hexdigest()
        self.end_of_text = self._find_end()

    def _find_end(self) -> int:
        for token in _ENDS:
            found = self._inner.token_to_id(token)
            if found is not None:
                return int(found)
        raise DataError(f"tokenizer {self.name!r} has no end-of-text token; add one of {', '.join(_ENDS)} to it")

    def encode(self, text: str) -> Ids:
        """The ids of a text, without special tokens."""
        return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of some ids, special tokens included."""
        return str(self._inner.decode([int(token) for token in ids], skip_special_tokens=False))


_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name: ``"bytes"``, or the path of a Hugging Face ``tokenizer.json``."""
    return ByteTokenizer() if name == ByteTokenizer.name else HuggingFaceTokenizer(Path(name))
