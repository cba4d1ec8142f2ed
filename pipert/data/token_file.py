r"""A file of token ids that is mapped into memory, not read.

The first 4,096 bytes are a header for people and programs: a line that names the format, one line of JSON, spaces. Then
come the ids as little-endian unsigned integers, as NumPy holds them (never a pickle).

    pipert tokens\n
    {"dtype": "uint8", "fingerprint": ..., "heldout_from": ..., "payload": <blake2b of the ids>, ...}\n
    <spaces up to byte 4,096> 0x12 0x07 ...

A file appears under its name only when it is complete, and `open_tokens` refuses one of which any byte has changed.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pipert.data.tokenizer import Ids, Tokenizer
from pipert.errors import DataError

_MAGIC = b"pipert tokens\n"
_HEADER_BYTES = 4096
_VERSION = 1
_CHUNK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TokenHeader:
    """What a token file says of itself.

    Attributes:
        version: of the format.
        dtype: ``uint8``, ``uint16`` or ``uint32``.
        tokens: number of ids.
        heldout_from: ids from this place on are for evaluation only.
        vocabulary: every id is below it.
        tokenizer: the tokenizer's name.
        fingerprint: the tokenizer's fingerprint.
        recipe: what the file was made from, for those who cache files; free text.
        payload: blake2b of the ids' bytes: two files with equal ones hold equal ids.
    """

    version: int
    dtype: str
    tokens: int
    heldout_from: int
    vocabulary: int
    tokenizer: str
    fingerprint: str
    recipe: str
    payload: str

    def encode(self) -> bytes:
        """The first 4,096 bytes of the file."""
        fields = asdict(self)
        fields["header"] = _checksum(json.dumps(fields, sort_keys=True).encode())
        text = _MAGIC + json.dumps(fields, sort_keys=True).encode() + b"\n"
        if len(text) > _HEADER_BYTES:
            raise DataError(f"a header of {len(text)} bytes is longer than {_HEADER_BYTES}; shorten the recipe")
        return text.ljust(_HEADER_BYTES, b" ")


@dataclass(frozen=True)
class TokenFile:
    """A token file, mapped into memory.

    Attributes:
        path: where it is.
        header: what it says of itself.
        tokens: all ids, read-only, shape (tokens,).
    """

    path: Path
    header: TokenHeader
    tokens: Ids

    @property
    def train(self) -> Ids:
        """The ids to train on."""
        return self.tokens[: self.header.heldout_from]

    @property
    def heldout(self) -> Ids:
        """The ids to evaluate on."""
        return self.tokens[self.header.heldout_from :]


class TokenWriter:
    """Write a token file piece by piece; it appears under its name when the ``with`` block ends without an error.

    Several processes may write the same file at once: each writes a file of its own, and the last one stays.

    Args:
        path: the file to make; its folder is made too.
        tokenizer: whose ids these are.
        recipe: what the file is made from.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, recipe: str = "") -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.tokens = 0
        self.heldout_from: int | None = None
        self._dtype = np.min_scalar_type(tokenizer.vocabulary - 1).newbyteorder("<")
        self._hash = blake2b(digest_size=16)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._file: BinaryIO

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._temporary.open("xb")
        self._file.write(bytes(_HEADER_BYTES))
        return self

    def append(self, ids: Ids) -> None:
        """Add ids.

        Raises:
            DataError: an id is outside of the tokenizer's vocabulary.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocabulary:
            raise DataError(
                f"token ids from {ids.min()} to {ids.max()} for a vocabulary of {self.tokenizer.vocabulary}; "
                f"tokenizer {self.tokenizer.name!r} does not keep to its own"
            )
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._hash.update(content)
        self.tokens += len(ids)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            with self._file as file:
                if error is None:
                    file.seek(0)
                    file.write(self._header().encode())
                    file.flush()
                    os.fsync(file.fileno())
            if error is None:
                self._temporary.replace(self.path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _header(self) -> TokenHeader:
        return TokenHeader(
            version=_VERSION,
            dtype=self._dtype.name,
            tokens=self.tokens,
            heldout_from=self.tokens if self.heldout_from is None else self.heldout_from,
            vocabulary=self.tokenizer.vocabulary,
            tokenizer=self.tokenizer.name,
            fingerprint=self.tokenizer.fingerprint,
            recipe=self.recipe,
            payload=self._hash.hexdigest(),
        )


def open_tokens(path: str | Path, *, verify: bool = True) -> TokenFile:
    """Map a token file into memory.

    Args:
        path: the file.
        verify: whether to read it once and compare checksums (about 1 s a GB). Its header and length always are.

    Raises:
        DataError: there is no such file, it is no token file, or it is not as it was written.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"token file {path} cannot be read: {error.strerror}") from error
    header = _decode(path, head)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    expected = _HEADER_BYTES + header.tokens * dtype.itemsize
    if size != expected:
        raise _damaged(path, f"it has {size:,} bytes where its header promises {expected:,}")
    tokens: npt.NDArray[Any] = np.zeros(0, dtype)
    if header.tokens:
        tokens = np.memmap(path, dtype, mode="r", offset=_HEADER_BYTES, shape=(header.tokens,))
    if verify and _payload(tokens) != header.payload:
        raise _damaged(path, "its token ids do not have the checksum in its header")
    return TokenFile(path, header, tokens)


def _decode(path: Path, head: bytes) -> TokenHeader:
    if not head.startswith(_MAGIC):
        raise DataError(f"{path} is not a token file: it does not start with {_MAGIC.decode().strip()!r}")
    try:
        fields = json.loads(head[len(_MAGIC) :])
        version = fields["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, "its header is not what was written") from error
    if version != _VERSION:
        raise DataError(f"token file {path} has format {version}, and this pipert reads {_VERSION}; build it again")
    fields.pop("header", None)
    try:
        header = TokenHeader(**fields)
    except TypeError as error:
        raise _damaged(path, "its header is not what was written") from error
    if header.encode() != head:
        raise _damaged(path, "its header does not have its own checksum")
    return header


def _damaged(path: Path, how: str) -> DataError:
    return DataError(f"token file {path} is damaged: {how}; delete it, and it will be built again from the texts")


def _payload(tokens: Ids) -> str:
    digest = blake2b(digest_size=16)
    for start in range(0, len(tokens), _CHUNK):
        digest.update(tokens[start : start + _CHUNK].tobytes())
    return digest.hexdigest()


def _checksum(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()
