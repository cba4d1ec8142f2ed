"""The shape of a GPT, and what follows from it: parameters and floating-point operations. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal

from pipert.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a decoder-only transformer.

    Attributes:
        layers: transformer blocks.
        hidden: width of the residual stream.
        heads: query heads; each is ``hidden / heads`` wide.
        sequence: longest sequence, in tokens.
        vocabulary: number of token ids.
        kv_heads: key and value heads, shared by groups of query heads (Ainslie et al. 2023); default ``heads``.
        mlp: width of the feed-forward layer; default ``4 * hidden``, for SwiGLU 2/3 of it, rounded up to 8.
        positions: learned vectors, or rotation of queries and keys (Su et al. 2021).
        norm: LayerNorm or RMSNorm.
        activation: GELU (tanh form), or SwiGLU (Shazeer 2020), which has a gate beside the up projection.
        bias: whether linear layers and LayerNorms have a bias.
        tied: whether the head's weight is the embedding's.
        dropout: probability after the embedding, attention and feed-forward, in training.
        rotary_base: longest wavelength of the rotation is ``2 pi rotary_base``.
        norm_eps: added to the variance before its square root.
        init_std: standard deviation of initial weights; those that write to the residual stream get
            ``init_std / sqrt(2 * layers)`` (GPT-2).
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int | None = None
    mlp: int | None = None
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    activation: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "key_heads", "mlp_width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                field = {"key_heads": "kv_heads", "mlp_width": "mlp"}.get(name, name)
                raise ConfigError(f"{field} is {value!r}; it must be a whole number of at least 1")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}")
        for name in ("rotary_base", "norm_eps", "init_std"):
            if not 0.0 < getattr(self, name) < inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be above 0 and finite")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout is {self.dropout!r}; it must be at least 0 and below 1")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(
                f"hidden {self.hidden} / heads {self.heads} leaves {self.hidden % self.heads} over; every head needs "
                f"the same width, so use hidden {self.hidden // self.heads * self.heads or self.heads} or "
                f"{(self.hidden // self.heads + 1) * self.heads}, or another number of heads"
            )
        if self.heads % self.key_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ConfigError(
                f"{self.heads} heads cannot share {self.key_heads} kv_heads evenly; use one of {divisors}"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ConfigError(
                f"hidden {self.hidden} / heads {self.heads} = {self.head_width} is odd, and rotary positions turn "
                "pairs of numbers; use an even head width, or learned positions"
            )

    def tensor_parallel_problems(self, ranks: int, *, sequence_parallel: bool = False) -> Iterator[str]:
        """Why so many tensor-parallel ranks cannot share the model: a sentence for each division with a remainder.

        Args:
            ranks: tensor-parallel ranks.
            sequence_parallel: whether the activations between the layers are shared out by positions, too.
        """
        if self.heads % ranks:
            yield f"heads {self.heads} / tp {ranks} leaves {self.heads % ranks} over; tp must divide the heads"
        keys = self.key_heads
        if keys % ranks and ranks % keys:
            yield (
                f"kv_heads {keys} / tp {ranks} leaves {keys % ranks} over, and tp {ranks} / kv_heads {keys} leaves "
                f"{ranks % keys} over; one must divide the other"
            )
        if self.mlp_width % ranks:
            fits = -(-self.mlp_width // ranks) * ranks
            yield f"mlp {self.mlp_width} / tp {ranks} leaves {self.mlp_width % ranks} over; use mlp = {fits}"
        if sequence_parallel and self.sequence % ranks:
            yield (
                f"sequence {self.sequence} / tp {ranks} leaves {self.sequence % ranks} over; with sequence parallelism "
                f"every rank needs as many positions, so use sequence = {-(-self.sequence // ranks) * ranks}"
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_width(self) -> int:
        """Width of the feed-forward layer, with the default filled in."""
        if self.mlp is not None:
            return self.mlp
        return -(-8 * self.hidden // 24) * 8 if self.activation == "swiglu" else 4 * self.hidden

    @property
    def qkv_width(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.heads + 2 * self.key_heads) * self.head_width

    @property
    def up_width(self) -> int:
        """Rows of the up projection; for SwiGLU the gate's rows come first."""
        return self.mlp_width * (2 if self.activation == "swiglu" else 1)

    @property
    def block_weights(self) -> int:
        """Elements of the four matrices of a block."""
        return self.hidden * (self.qkv_width + self.hidden + self.up_width + self.mlp_width)

    @property
    def parameters(self) -> int:
        """Exact number of parameters; tied ones count once."""
        norm = self.hidden * (2 if self.norm == "layernorm" and self.bias else 1)
        biases = self.qkv_width + self.up_width + 2 * self.hidden if self.bias else 0
        embedding = self.vocabulary * self.hidden + (self.sequence * self.hidden if self.positions == "learned" else 0)
        head = 0 if self.tied else self.vocabulary * self.hidden
        return embedding + self.layers * (self.block_weights + biases + 2 * norm) + norm + head

    def forward_flops(self, sequence: int | None = None) -> float:
        """Operations a token needs in a forward pass: 2 for each multiply-add of the matrix products.

        Attention counts every pair of positions, the masked ones too, as the usual figures of utilisation do
        (Narayanan et al. 2021, Chowdhery et al. 2022): ``4 * sequence * hidden`` a layer. Norms, activations and the
        softmax are left out.

        Args:
            sequence: length of the sequences; default the longest.
        """
        attention = 4 * (sequence or self.sequence) * self.hidden
        return float(self.layers * (2 * self.block_weights + attention) + 2 * self.vocabulary * self.hidden)

    def training_flops(self, sequence: int | None = None, *, recompute: bool = False) -> float:
        """Operations a token needs in a training step: the backward pass costs two forward passes.

        Args:
            sequence: length of the sequences; default the longest.
            recompute: whether the blocks (not the head) run forward once more. Operations done, for the utilisation
                of the hardware; the model's utilisation counts them without.
        """
        forward = self.forward_flops(sequence)
        again = forward - 2 * self.vocabulary * self.hidden if recompute else 0.0
        return 3 * forward + again


_CHOICES = {
    "positions": ("learned", "rotary"),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "swiglu"),
}
