"""The sections of a configuration file and the limits of each key. Rules between keys are in `Config`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """A section: frozen; only known keys; a value is not converted to another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataConfig(Section):
    """What is trained on.

    Attributes:
        text: text files and folders; none: the sources of Python's standard library.
        tokenizer: ``"bytes"``, or the path of a Hugging Face ``tokenizer.json``.
        heldout: share of the text that is held out for evaluation.
        split: hold out whole files, or the end of the text.
        folder: where token files are kept.
        global_batch: sequences an optimizer step, over all replicas and micro-batches.
    """

    text: Annotated[tuple[str, ...], Field(strict=False)] = ()
    tokenizer: str = "bytes"
    heldout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    split: Literal["file", "range"] = "file"
    folder: str = "runs/data"
    global_batch: AtLeastOne


class OptimizerConfig(Section):
    """AdamW.

    Attributes:
        lr: peak learning rate.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the denominator.
        weight_decay: for matrices and embeddings; norms and biases have none.
        clip: largest norm of the gradients; larger ones are scaled down. 0: they are left alone.
        early: each stage is updated as soon as its gradients are whole, and taken back where that was wrong.
    """

    lr: Positive = 3e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    clip: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    early: bool = False


class ScheduleConfig(Section):
    """The learning rate over the optimizer's updates.

    Attributes:
        shape: how it falls after the warm-up.
        warmup: updates in which it rises to its peak.
        final: its end, as a share of the peak; not for a constant one.
        length: updates until its end; default the steps of the run.
    """

    shape: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: NotNegative = 0
    final: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    length: AtLeastOne | None = None


class ParallelConfig(Section):
    """How the work is laid out on ranks.

    Attributes:
        pp: pipeline ranks.
        dp: data-parallel replicas.
        tp: tensor-parallel ranks.
        sequence_parallel: with tp, activations between the layers are shared out by positions, too.
        schedule: name of the pipeline schedule (`pipert schedule list` shows them), or ``"auto"``: searched for the
            measured times of the model's blocks.
        chunks: stages a pipeline rank; 1 leaves a searched schedule the choice between one and two.
        in_flight: for a searched schedule, the most micro-batches whose activations a rank keeps; default ``pp``.
        micro_batch: sequences a micro-batch.
        recompute: activations computed again in the backward pass instead of kept: none, those of
            attention (selective), those inside each block, or everything inside a stage.
        offload: micro-batches whose activations each stage keeps on the device; those of others wait in host memory.
        zero: ZeRO stage: what replicas share out: 1 the optimizer's state, 2 gradients too, 3 weights too.
        vocabulary: embedding and head at the ``ends`` of the pipeline, or ``spread`` over all its ranks.
        tensors: what moves them between ranks: ``mpi``, which reaches the CPU's memory; or ``rccl`` (on NVIDIA NCCL):
            then each rank computes on a GPU of its own. ``rccl-direction`` needs more streams and waits less.
    """

    pp: AtLeastOne = 1
    dp: AtLeastOne = 1
    tp: AtLeastOne = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    chunks: AtLeastOne = 1
    in_flight: AtLeastOne | None = None
    micro_batch: AtLeastOne = 1
    recompute: Literal["none", "selective", "block", "full"] = "none"
    offload: AtLeastOne | None = None
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    vocabulary: Literal["ends", "spread"] = "ends"
    tensors: Literal["mpi", "rccl", "rccl-direction"] = "mpi"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp


class RunConfig(Section):
    """How long, how often, where to.

    Attributes:
        steps: optimizer steps.
        seed: of initial weights, dropout and the order of samples.
        precision: of weights and activations; half precision has fp32 masters and sums, fp16 a dynamic loss scale.
        eval_every: steps between evaluations; there is one before the first step and one after the last.
        eval_samples: held-out sequences an evaluation, at most.
        timeline_every: steps between measurements of the bubble.
        deadline: seconds that a rank waits for another before the job ends with a report.
        output: folder for metrics and pictures. Those of an earlier run are not written over, but moved into
            ``earlier-1`` there, then ``earlier-2``.
    """

    steps: AtLeastOne
    seed: NotNegative = 0
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    eval_every: AtLeastOne = 50
    eval_samples: AtLeastOne = 64
    timeline_every: AtLeastOne = 10
    deadline: Positive = 120.0
    output: str = "runs/gpt"
