"""What the verifier says: a proof as a statement, a fault as a picture."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipert.scheduler.errors import DeadlockError, UnsafeProgramError
from pipert.scheduler.formats.text import loads
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement
from pipert.scheduler.semantics import MPI, MPI_SYNCHRONOUS
from pipert.scheduler.verify import verify
from tests.scheduler.hand_written import GOOD, crossing, schedule

ROOT = Path(__file__).resolve().parents[2]


def test_a_proof_prints_what_it_proved() -> None:
    proof = verify(lower(one_f_one_b(2, 2), MPI), limits=2)
    assert str(proof) == (
        "safe: 1f1b, 2 ranks, 2 stages, 2 micro-batches, for mpi\n"
        "  ✓ bounds        every one of 16 actions is of a known kind, stage and micro-batch\n"
        "  ✓ ownership     every stage is on one rank, the one it is placed on\n"
        "  ✓ uniqueness    nothing is done twice\n"
        "  ✓ completeness  each of 2 micro-batches has its forward on each of 2 stages and its backward "
        "(B, or I and W) on each\n"
        "  ✓ message       each of 4 messages is sent once, received once, between the right ranks, and used\n"
        "  ✓ group         groups hold neighbouring messages only\n"
        "  ✓ dependency    on its rank, everything computed or sent stands after what it needs\n"
        "  ✓ collective    no stage is reduced, no weights are tied\n"
        "  ✓ weights       the weights of every stage are whole all the time\n"
        "  ✓ update        no weights are updated\n"
        "  ✓ offload       no activations are moved to host memory\n"
        "  ✓ swap          messages are matched by tag, so none can reach another's receive\n"
        "  ✓ deadlock      every action happens under mpi: rendezvous sends, matched by tag, no queues\n"
        "  ✓ limit         at most 2, 1 micro-batches live per rank, allowed 2"
    )
    assert proof.require() is proof
    assert proof == verify(lower(one_f_one_b(2, 2), MPI), limits=2)


def test_a_fault_prints_as_the_actions_around_it_with_an_arrow() -> None:
    proof = verify(crossing(MPI_SYNCHRONOUS))
    assert str(proof) == (
        "unsafe: hand-written, 2 ranks, 3 stages, 2 micro-batches, for mpi-synchronous\n"
        "  deadlock at rank 0, action 3 (0SEND_F1): rank 0 waits in SEND 0F1 to rank 1, "
        "which waits in SEND 1F0 to rank 0, which waits in SEND 0F1 to rank 1\n"
        "\n"
        "  rank 0  0:  0F0  0SEND_F0  0F1  0SEND_F1  2RECV_F0  2F0  2RECV_F1\n"
        "                                  ^^^^^^^^\n"
        "  rank 1  0:       1RECV_F0  1F0  1SEND_F0  1RECV_F1  1F1  1SEND_F1\n"
        "                                  ^^^^^^^^\n"
        "\n"
        "  remedy: put them in another order, issue crossing messages as a group and no others, or use buffered sends"
    )
    with pytest.raises(UnsafeProgramError, match="remedy: put them in another order"):
        proof.require()


def test_a_missing_action_has_its_arrow_at_the_end_of_the_row() -> None:
    proof = verify(schedule("0 1", 2, GOOD[0], "1F0 1B0 1F1"))
    assert "  rank 1  0:  1F0  1B0  1F1  (1B1?)\n                             ^^^^^^" in str(proof)


def test_all_actions_of_a_rank_that_take_part_have_arrows() -> None:
    proof = verify(schedule("0 1", 2, GOOD[0], "1F0 1B0 1F1 1I0 1W0"))
    assert "  rank 1  0:  1F0  1B0  1F1  1I0  1W0\n                   ^^^       ^^^  ^^^\n" in str(proof)


def test_only_the_ranks_at_fault_and_their_neighbours_are_drawn() -> None:
    rows = [str(row) for row in one_f_one_b(64, 4).rows]
    rows[30] = rows[30].replace("30B2", "30B1")
    proof = verify(schedule(str(Placement.linear(64)), 4, *rows))
    drawn = [line.split()[1] for line in str(proof).splitlines() if line.startswith("  rank")]
    assert drawn == ["29", "30", "31"]


def test_many_faults_are_cut_short() -> None:
    proof = verify(schedule("0 1", 64, "0F0", "1F0"))
    assert len(proof.faults) == 20
    assert str(proof).endswith("or more others")


def test_the_examples_in_the_documents_are_what_the_verifier_says() -> None:
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "verifier.md").read_text(encoding="utf-8"), re.DOTALL)
    files, answers = blocks[::2], blocks[1::2]
    assert len(files) == len(answers) > 8
    for file, answer in zip(files, answers, strict=True):
        assert f"{verify(loads(file))}\n" == answer
    assert {answer.split("\n")[1].split()[0] for answer in answers} >= {"deadlock", "swap", "message", "collective"}


def test_the_deadlock_error_is_an_unsafe_program_error() -> None:
    assert issubclass(DeadlockError, UnsafeProgramError)


def test_small_programs_are_checked_without_numba_and_torch() -> None:
    script = (
        "import sys\n"
        "from pipert.scheduler.generators.one_f_one_b import one_f_one_b\n"
        "from pipert.scheduler.lower import lower\n"
        "from pipert.scheduler.semantics import MPI\n"
        "from pipert.scheduler.verify import verify\n"
        "verify(lower(one_f_one_b(4, 8), MPI)).require()\n"
        "assert not {'numba', 'torch', 'networkx', 'matplotlib', 'mpi4py'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
