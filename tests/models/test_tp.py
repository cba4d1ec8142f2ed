"""A GPT whose layers tensor-parallel ranks share trains to the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from pipert.comm.errors import MeshError
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.errors import BatchError, ConfigError
from pipert.layers.parallelize import parallelize
from pipert.models import GPT, CausalLMLoss, GPTConfig
from tests.models.layouts import SEED, alone, assert_agree, batches, on_ranks

SHAPE: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 61}
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("tp", [2, 4])
def test_gradients_norm_and_weights_are_those_of_one_process(tp: int, optimizer: Any) -> None:
    config = GPTConfig(**SHAPE)
    steps = batches(config, 3, 4)
    wanted = alone(config, steps, 2, optimizer=optimizer)
    assert_agree(on_ranks(config, steps, 2, tp=tp, optimizer=optimizer), wanted)
    assert_agree(on_ranks(config, steps, 2, tp=tp, sequence_parallel=True, optimizer=optimizer), wanted)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[GPTConfig, dict[str, Any], int]:
    def one_of(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    pp, dp, tp, schedule, chunks = one_of(
        (1, 1, 2, "1f1b", 1),
        (1, 2, 2, "gpipe", 1),
        (2, 1, 2, "1f1b", 1),
        (2, 1, 2, "interleaved", 2),
        (2, 1, 2, "zb-h1", 1),
        (2, 1, 2, "zb-v", 1),
        (1, 1, 4, "1f1b", 1),
        (2, 2, 2, "1f1b", 1),
        (2, 1, 4, "zb-h1", 1),
    )
    config = GPTConfig(
        **{**SHAPE, "vocabulary": one_of(61, 64, 5), "sequence": one_of(4, 8)},
        kv_heads=one_of(None, 1, 2),
        mlp=one_of(None, 24),
        positions=one_of("learned", "rotary"),
        norm=one_of("layernorm", "rmsnorm"),
        activation=one_of("gelu", "swiglu"),
        bias=one_of(True, False),
        tied=one_of(True, False),
        dropout=one_of(0.0, 0.5),
    )
    layout = {"pp": pp, "dp": dp, "tp": tp, "schedule": schedule, "chunks": chunks}
    extra = {"sequence_parallel": one_of(True, False), "recompute": one_of("none", "block", "full")}
    return config, {**layout, **extra}, dp * draw(st.integers(1, 3))


@settings(max_examples=15, deadline=None)
@given(world=worlds())
def test_any_model_in_any_layout_has_the_gradients_of_one_process(world: tuple[GPTConfig, dict[str, Any], int]) -> None:
    config, layout, microbatches = world
    steps = batches(config, 1, 6, ignored=0.2)
    assert_agree(on_ranks(config, steps, microbatches, **layout), alone(config, steps, microbatches))


@pytest.mark.parametrize("tp", [2, 4])
def test_few_key_heads_are_on_several_ranks_and_stay_equal_there(tp: int) -> None:
    config = GPTConfig(**{**SHAPE, "heads": 8}, kv_heads=2, **LLAMA)
    steps = batches(config, 3, 2)
    assert_agree(on_ranks(config, steps, 1, tp=tp, optimizer=adamw), alone(config, steps, 1, optimizer=adamw))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothing_and_z_loss_are_those_of_one_process(smoothing: float) -> None:
    config = GPTConfig(**SHAPE)
    steps = batches(config, 1, 4, ignored=0.3)
    loss = CausalLMLoss(smoothing=smoothing, z_loss=1e-2)
    assert_agree(on_ranks(config, steps, 2, pp=2, tp=2, loss_fn=loss), alone(config, steps, 2, loss_fn=loss))


def test_a_loss_that_knows_nothing_of_ranks_gets_all_logits() -> None:
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert logits.shape[-1] == 61
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    config = GPTConfig(**SHAPE)
    steps = batches(config, 1, 4)
    wanted = alone(config, steps, 2, loss_fn=loss)
    assert_agree(on_ranks(config, steps, 2, tp=2, loss_fn=loss), wanted)
    assert_agree(on_ranks(config, steps, 2, pp=2, tp=2, sequence_parallel=True, loss_fn=loss), wanted)


def test_weights_that_are_there_already_are_shared_out() -> None:
    config = GPTConfig(**SHAPE, **LLAMA, kv_heads=1)
    steps = batches(config, 2, 4)
    got = on_ranks(config, steps, 2, pp=2, tp=2, real=True, optimizer=adamw)
    assert_agree(got, alone(config, steps, 2, optimizer=adamw))


@pytest.mark.parametrize("recompute", ["none", "block", "full"])
def test_dropout_masks_are_those_of_one_process_where_the_sequence_is_shared_out(recompute: str) -> None:
    config = GPTConfig(**SHAPE, dropout=0.5)
    steps = batches(config, 1, 4)
    got = on_ranks(config, steps, 2, pp=2, tp=2, sequence_parallel=True, recompute=recompute)
    assert_agree(got, alone(config, steps, 2))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_twenty_steps_leave_all_copies_bitwise_equal_and_near_one_process(sequence_parallel: bool) -> None:
    config = GPTConfig(**SHAPE)
    steps = batches(config, 20, 4)
    options: dict[str, Any] = {"optimizer": sgd, "dtype": torch.float32}
    got = on_ranks(config, steps, 2, tp=2, sequence_parallel=sequence_parallel, **options)  # compares the copies
    wanted = alone(config, steps, 2, **options)
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layout_repeats_itself_bitwise_with_and_without_overlap(schedule: str, sequence_parallel: bool) -> None:
    config = GPTConfig(**SHAPE, **LLAMA)
    steps = batches(config, 2, 4)
    options: dict[str, Any] = {"pp": 2, "tp": 2, "sequence_parallel": sequence_parallel, "optimizer": adamw}
    runs = [
        on_ranks(config, steps, 2, schedule=way, overlap=overlap, dtype=torch.float32, **options)
        for way, overlap in ((schedule, True), (schedule, True), (schedule, False), ("gpipe", True))
    ]
    for other in runs[1:]:
        assert_agree(other, runs[0], 0.0)


def test_what_is_evaluated_and_given_back_is_whole() -> None:
    config = GPTConfig(**SHAPE)
    (batch,) = batches(config, 1, 4)
    model = GPT(config, "cpu", seed=SEED)
    wanted = model(batch[0])

    def rank(_: Any) -> tuple[float, torch.Tensor | None]:
        pipe = Pipeline(GPT(config), CausalLMLoss(), Mesh.local(pp=2, tp=2), microbatches=2, seed=SEED)
        result = pipe.eval_step(batch, outputs=True)
        return result.loss, torch.cat(result.outputs) if result.outputs else None

    outcomes = run_ranks(4, rank)
    assert len({loss for loss, _ in outcomes}) == 1
    assert [logits is None for _, logits in outcomes] == [True, True, False, False]
    for logits in (outcomes[2][1], outcomes[3][1]):
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tp", "change", "words"),
    [
        (3, {"heads": 8, "kv_heads": 2}, r"heads 8 / tp 3 leaves 2 over; tp must divide the heads"),
        (4, {"heads": 12, "hidden": 48, "kv_heads": 6}, r"kv_heads 6 / tp 4 leaves 2 over, and tp 4 / kv_heads 6"),
        (4, {"mlp": 30}, r"mlp 30 / tp 4 leaves 2 over; use mlp = 32"),
    ],
)
def test_shapes_that_cannot_be_shared_are_refused_with_the_sum_that_does_not_come_out(
    tp: int, change: dict[str, Any], words: str
) -> None:
    config = GPTConfig(**{**SHAPE, **change})

    def rank(_: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            Pipeline(GPT(config), CausalLMLoss(), Mesh.local(tp=tp))

    run_ranks(tp, rank)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    def configured(_: Any) -> None:
        with pytest.raises(ConfigError, match=r"sequence 15 / tp 2 leaves 1 over.*use sequence = 16"):
            parallelize(GPT(GPTConfig(**{**SHAPE, "sequence": 15})), Mesh.local(tp=2), sequence_parallel=True)

    run_ranks(2, configured)
    config = GPTConfig(**SHAPE)
    odd = replace(config, sequence=15)
    with pytest.raises(BatchError, match="a sequence of 15 tokens / tp 2 leaves 1 over"):
        on_ranks(config, batches(odd, 1, 2), 1, tp=2, sequence_parallel=True)
    assert_agree(on_ranks(config, batches(odd, 1, 2), 1, tp=2), alone(config, batches(odd, 1, 2), 1))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_last_id_works_and_the_next_is_an_error_although_rows_are_padded(tp: int) -> None:
    config = GPTConfig(**SHAPE)
    last = torch.full((2, 16), 60)
    assert_agree(on_ranks(config, [(last, last)], 1, tp=tp), alone(config, [(last, last)], 1))
    with pytest.raises(BatchError, match=r"token id 61 in a vocabulary of 61; ids must be 0 \.\. 60"):
        on_ranks(config, [(last + 1, last)], 1, tp=tp)
    if tp > 1:
        with pytest.raises(BatchError, match="target 61 in a vocabulary of 61"):
            on_ranks(config, [(last, last + 1)], 1, tp=tp)


@pytest.mark.parametrize(("pp", "tp", "words"), [(4, 2, "pp\\*tp\\*dp = 8 but 4 ranks"), (3, 1, "= 3 but 4 ranks")])
def test_meshes_that_do_not_fit_the_ranks_are_refused(pp: int, tp: int, words: str) -> None:
    def rank(_: Any) -> None:
        with pytest.raises(MeshError, match=words):
            Mesh.local(pp=pp, tp=tp)

    run_ranks(4, rank)


def test_a_model_is_shared_out_once_and_over_the_ranks_of_the_pipeline() -> None:
    def rank(_: Any) -> None:
        mesh = Mesh.local(tp=2)
        model = parallelize(GPT(GPTConfig(**SHAPE)), mesh)
        with pytest.raises(ConfigError, match="the model is a rank's part already; give every rank a whole model"):
            parallelize(model, mesh)
        with pytest.raises(ConfigError, match=r"part \d of 2, but this is rank 0 of tp = 1; parallelize the model on"):
            Pipeline(model, CausalLMLoss(), Mesh.local(dp=2))

    run_ranks(2, rank)
