"""Costs of blocks without an example: from the shapes of their parameters."""

from __future__ import annotations

from dataclasses import replace

from pipert.graph.model_graph import Block, ModelGraph

_FLOPS_PER_SECOND = 1e12
_OVERHEAD = 0.01


def estimate(graph: ModelGraph) -> ModelGraph:
    """Fill in times that are right relative to each other for a model of matrix products.

    A block's forward is two operations per token for each element of its parameters with two or more dimensions
    (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Rows that are looked up (embeddings) multiply nothing, so they
    count nothing: blocks weigh by time, not by parameter count. A tied head counts in the head's block. On top comes
    1 % of the heaviest block for each, so that none is free. A backward is one forward for the gradients of trainable
    parameters and one for the gradient of the input, where an earlier block has a trainable parameter.

    Attention's products of activations, convolutions' sizes and anything else without parameters are not seen: profile
    on an example where they matter. The unit is a nominal second per token at 1e12 operations per second.

    Args:
        graph: from `trace`.

    Returns:
        The graph with ``costs="estimated"``; activation bytes stay unknown.
    """
    work = [_operations(block) for block in graph.blocks]
    overhead = _OVERHEAD * max(work) or 1.0
    forward = [(w + overhead) / _FLOPS_PER_SECOND for w in work]
    backward, weights, flowing = [], [], False
    for block, seconds in zip(graph.blocks, forward, strict=True):
        trainable = any(p.trainable for p in block.parameters)
        backward.append(seconds * (flowing + trainable))
        weights.append(seconds * trainable)
        flowing = flowing or trainable
    costed = graph.with_costs(forward, backward, "estimated")
    blocks = (replace(b, weight_gradient=w) for b, w in zip(costed.blocks, weights, strict=True))
    return replace(costed, blocks=tuple(blocks))


def _operations(block: Block) -> float:
    """Floating-point operations per token of the forward's products with parameters."""
    return float(sum(2 * p.numel for p in block.parameters if len(p.shape) >= 2 and not p.lookup))
