"""Models that pipert trains: a GPT whose chain of blocks is open to the pipeline."""

from __future__ import annotations

from pipert.gpt_config import GPTConfig
from pipert.models.gpt import GPT
from pipert.models.loss import CausalLMLoss, token_cross_entropy

__all__ = ["GPT", "CausalLMLoss", "GPTConfig", "token_cross_entropy"]
