"""Text to batches: tokenizers, token files, and an order of samples that depends only on (seed, epoch)."""

from __future__ import annotations

from pipert.data.corpus import Corpus, prepare_corpus, standard_library, text_files
from pipert.data.loader import Loader
from pipert.data.order import Order
from pipert.data.token_file import TokenFile, TokenWriter, open_tokens
from pipert.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from pipert.data.unigram import unigram_loss
from pipert.data.windows import TokenWindows

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "Loader",
    "Order",
    "TokenFile",
    "TokenWindows",
    "TokenWriter",
    "Tokenizer",
    "open_tokenizer",
    "open_tokens",
    "prepare_corpus",
    "standard_library",
    "text_files",
    "unigram_loss",
]
