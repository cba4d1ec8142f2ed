"""The training loop that the examples use: a GPT, from a configuration to a summary with pictures."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile

import numpy as np
from rich.console import Console

from pipert.comm.mesh import Mesh
from pipert.config import Config
from pipert.data.corpus import Corpus, prepare_corpus, standard_library, text_files
from pipert.data.loader import Loader
from pipert.data.token_file import TokenFile, open_tokens
from pipert.data.tokenizer import open_tokenizer
from pipert.data.unigram import unigram_loss
from pipert.data.windows import TokenWindows
from pipert.engine.refusals import together
from pipert.errors import ConfigError, DataError
from pipert.recipe import Updater, check_mesh, make_optimizer, make_pipeline
from pipert.report.log import RunLog
from pipert.report.measured import measured_costs, typical
from pipert.report.metrics import Value
from pipert.report.peak import measured_peak
from pipert.report.pictures import save_pictures
from pipert.report.summary import Summary
from pipert.scheduler.draw.text import text
from pipert.scheduler.program import Program
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline


def train(config: Config, mesh: Mesh, console: Console | None = None) -> Summary:
    """Train a GPT as configured. Every rank makes the same call; rank 0 shows how it goes.

    Args:
        config: the configuration.
        mesh: the ranks, laid out as the configuration says.
        console: where rank 0 writes; default standard output.

    Raises:
        ConfigError: the mesh is not the configured one, or something is configured that cannot be run.
        DataError: the text cannot be used.
    """
    return Trainer(config, mesh, console or Console()).run()


class Trainer:
    """One training run. All ranks make the same calls; see `train`.

    Attributes:
        config: the configuration.
        mesh: the ranks.
        text: the tokens.
        pipe: the model in its pipeline.
        updater: changes the weights.
        loader: this replica's batches.
    """

    def __init__(self, config: Config, mesh: Mesh, console: Console) -> None:
        check_mesh(config, mesh)
        self.config, self.mesh, self._console = config, mesh, console
        together(mesh.world, lambda: _check_folders(config, mesh))
        self.text = open_text(config, mesh)
        model, run = config.model, config.run
        self._windows = TokenWindows(self.text.train, model.sequence)
        self._heldout = TokenWindows(self.text.heldout, model.sequence)
        self.loader = Loader(
            self._windows, config.data.global_batch, seed=run.seed, replica=mesh.dp_rank, replicas=mesh.dp
        )
        example = self._windows.batch(range(min(config.parallel.micro_batch, len(self._windows))))[0]
        self.pipe = make_pipeline(config, mesh, example)
        self.updater = Updater(config, self.pipe, make_optimizer(config, self.pipe))
        self._timelines: deque[Timeline] = deque(maxlen=8)

    def run(self) -> Summary:
        """Train, evaluate now and then, draw what was measured."""
        run = self.config.run
        folder = Path(run.output)
        with RunLog(self.mesh.rank == 0, self._console, folder / "metrics.jsonl", run.steps) as log:
            self._introduce(log)
            peak = self._peak()
            unigram = self._unigram()
            before = after = self._evaluate(0, unigram, log)
            begin, rates = time.perf_counter(), []
            for done in range(1, run.steps + 1):
                rates.append(self._step(done, peak, log))
                if done % run.eval_every == 0 or done == run.steps:
                    after = self._evaluate(done, unigram, log)
            tokens_per_second = median(rates)
            summary = Summary(
                steps=run.steps,
                updates=self.updater.updates,
                tokens=run.steps * self.config.tokens_per_step,
                seconds=time.perf_counter() - begin,
                before=before,
                after=after,
                unigram=unigram,
                tokens_per_second=tokens_per_second,
                utilisation=tokens_per_second * self.config.model.training_flops() / peak,
                bubble=typical(self._timelines).bubble,
                predicted_bubble=self._predicted().bubble,
            )
            return self._finish(summary, folder, log)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _step(self, done: int, peak: float, log: RunLog) -> float:
        """One step; returns its tokens a second."""
        rate, begin, seen = self.updater.rate, time.perf_counter(), self.loader.seen
        result = self.pipe.step(self.loader)
        if self.loader.seen == seen:  # this rank needed no data
            self.loader.skip()
        self.updater.update()
        speed = result.tokens / (time.perf_counter() - begin)
        utilisation = speed * self.config.model.training_flops() / peak
        record: dict[str, Value] = {"loss": result.loss, "lr": rate, "grad_norm": self.updater.norm}
        record["updates"] = self.updater.updates
        record |= {"samples": self.loader.seen, "tokens_per_second": speed, "utilisation": utilisation}
        if done % self.config.run.timeline_every == 0 or not self._timelines:
            self._timelines.append(self.pipe.timeline())
            record["bubble"] = self._timelines[-1].bubble
        figures = {"loss": f"{result.loss:.3f}", "tokens/s": f"{speed:,.0f}", "of peak": f"{utilisation:.0%}"}
        log.step(done, record, figures | {"bubble": f"{self._timelines[-1].bubble:.0%}"})
        return speed

    def _evaluate(self, done: int, unigram: float, log: RunLog) -> float:
        """Loss on held-out samples spread over the text; the same samples every time and in every layout."""
        replicas, batch = self.mesh.dp, self.config.data.global_batch
        count = min(self.config.run.eval_samples, len(self._heldout)) // replicas * replicas
        ids = np.linspace(0, len(self._heldout) - 1, count).astype(np.int64)
        total = counted = 0.0
        for start in range(0, count, batch):
            mine = np.array_split(ids[start : start + batch], replicas)[self.mesh.dp_rank]
            result = self.pipe.eval_step(self._heldout.batch(mine))
            total += result.loss * result.tokens
            counted += result.tokens
        loss = total / counted
        log.event(
            "evaluation",
            {"step": done, "heldout_loss": loss, "unigram_loss": unigram},
            f"step {done}: held-out loss {loss:.3f} (perplexity {math.exp(min(loss, 99)):.1f}; unigram {unigram:.3f})",
        )
        return loss

    # ---- around them -----------------------------------------------------------------------------------------------

    def _introduce(self, log: RunLog) -> None:
        model, parallel, header = self.config.model, self.config.parallel, self.text.header
        record: dict[str, Value] = {"parameters": model.parameters, "ranks": self.mesh.size}
        record |= {"tokenizer": header.tokenizer, "text": header.payload, "seed": self.config.run.seed}
        shared = f" × {parallel.tp} ranks a layer" if parallel.tp > 1 else ""
        lines = [
            f"{model.parameters:,} parameters, tokenizer {header.tokenizer}",
            f"{len(self.text.train):,} tokens to train on, {len(self.text.heldout):,} held out",
            f"{parallel.pp} pipeline ranks × {parallel.dp} replicas{shared}, {parallel.schedule}, "
            f"{self.config.microbatches} micro-batches of {parallel.micro_batch} sequences, "
            f"tensors on {self.mesh.device.type} over {parallel.tensors}",
            self.pipe.table(),
        ]
        log.event("start", record, "\n".join(lines))

    def _peak(self) -> float:
        """Operations a second of all ranks together, measured while all of them compute."""
        self.mesh.world.barrier()
        mine = measured_peak(device=self.mesh.device)
        return sum(float(blob) for blob in self.mesh.world.exchange(repr(mine).encode()))

    def _unigram(self) -> float:
        mine = (
            unigram_loss(self.text.train, self.text.heldout, self.text.header.vocabulary) if not self.mesh.rank else 0.0
        )
        return float(self.mesh.world.exchange(repr(mine).encode())[0])

    def _predicted(self) -> Timeline:
        program = self.pipe.proof.target
        assert isinstance(program, Program)
        return simulate(program, measured_costs(self._timelines, program.num_stages))

    def _finish(self, summary: Summary, folder: Path, log: RunLog) -> Summary:
        if not log.lead:
            return summary
        measured, predicted = typical(self._timelines).named("measured"), self._predicted().named("predicted")
        summary = replace(summary, files=(log.path, *save_pictures(measured, predicted, folder=folder)))
        numbers = {name: value for name, value in asdict(summary).items() if name != "files"}
        log.event("end", numbers, f"a typical step, measured, in seconds:\n{text(measured)}\n{summary}")
        return summary


def _check_folders(config: Config, mesh: Mesh) -> None:
    """Find out before the work, not after it, that its results cannot be written."""
    if mesh.rank:
        return
    for key, folder in {"run.output": config.run.output, "data.folder": config.data.folder}.items():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"{key} {folder} cannot be written to ({error.strerror}); name a folder that can"
            ) from error


def open_text(config: Config, mesh: Mesh) -> TokenFile:
    """The tokens, prepared by rank 0 and mapped by all."""
    data = config.data

    def prepare() -> str:
        if mesh.rank:
            return ""
        tokenizer = open_tokenizer(data.tokenizer)
        if tokenizer.vocabulary > config.model.vocabulary:
            raise ConfigError(
                f"model.vocabulary {config.model.vocabulary} is too small for the {tokenizer.vocabulary} ids of "
                f"data.tokenizer {data.tokenizer}; use {tokenizer.vocabulary}"
            )
        documents = text_files(*data.text) if data.text else standard_library()
        corpus = Corpus(documents, heldout=data.heldout, split=data.split)
        return str(prepare_corpus(corpus, tokenizer, Path(data.folder)).path)

    path = mesh.world.exchange(together(mesh.world, prepare).encode())[0].decode()

    def open_it() -> TokenFile:
        file = open_tokens(Path(path), verify=False)  # rank 0 has read it
        samples = (len(file.heldout) - 1) // config.model.sequence
        if samples < mesh.dp:
            raise DataError(
                f"the {len(file.heldout)} held-out tokens make {samples} samples of {config.model.sequence}, and each "
                f"of {mesh.dp} replicas needs one; hold out more, or use more text"
            )
        return file

    return together(mesh.world, open_it)
