"""The mesh: coordinates, groups, and the refusals that every rank gets before anything is made."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import FrozenInstanceError
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.comm.errors import MeshError, MessageError, TransportError
from pipert.comm.local import run_ranks
from pipert.comm.local_transport import LocalTransport
from pipert.comm.mesh import Mesh
from pipert.comm.mesh_shape import Coordinates, MeshShape
from pipert.comm.single import SingleTransport
from tests.mpi_harness import run_mpi

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")

ORDERS = [",".join(order) for order in permutations(("pp", "dp", "tp"))]


# ---- coordinates -----------------------------------------------------------------------------------------------------


def test_the_default_order_is_frontiers_tp_fastest_then_dp_then_pp() -> None:
    shape = MeshShape(pp=2, dp=2, tp=2)
    assert [shape.coordinates(rank).tp for rank in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [shape.coordinates(rank).dp for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [shape.coordinates(rank).pp for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [shape.group("tp", 5), shape.group("dp", 5), shape.group("pp", 5)] == [(4, 5), (5, 7), (1, 5)]


def test_another_order_makes_pipelines_of_neighbours() -> None:
    shape = MeshShape(pp=3, dp=2, order="pp, dp, tp")
    assert shape.order == "pp,dp,tp"
    assert [shape.group("pp", rank) for rank in (0, 3)] == [(0, 1, 2), (3, 4, 5)]
    assert shape.group("dp", 1) == (1, 4)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.sampled_from(ORDERS))
def test_every_rank_has_one_place_and_every_place_one_rank(pp: int, dp: int, tp: int, order: str) -> None:
    shape = MeshShape(pp, dp, tp, order)
    places = [shape.coordinates(rank) for rank in range(shape.size)]
    assert sorted(places) == sorted(product(range(pp), range(dp), range(tp)))
    assert [shape.rank_of(**place._asdict()) for place in places] == list(range(pp * dp * tp))
    fastest = order.split(",")[0]
    for axis in ("pp", "dp", "tp"):
        groups = {shape.group(axis, rank) for rank in range(shape.size)}  # type: ignore[arg-type]
        assert sorted(rank for group in groups for rank in group) == list(range(shape.size))
        assert all(list(group) == sorted(group) for group in groups)
        if axis == fastest:
            assert all(group[-1] - group[0] == len(group) - 1 for group in groups)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"pp": 0}, r"^pp = 0 is not a number of ranks; use at least 1 \(1 = no pp\)$"),
        ({"tp": -1}, r"^tp = -1 is not a number of ranks; use at least 1"),
        ({"dp": 2.0}, r"^dp = 2\.0 is not a whole number of ranks; use an int of at least 1$"),
        ({"pp": "4"}, r"^pp = '4' is not a whole number of ranks"),
        ({"pp": True}, r"^pp = True is not a whole number of ranks"),
        ({"pp": None}, r"^pp = None is not a whole number of ranks"),
        ({"order": "tp,pp"}, r"^order = 'tp,pp' must name pp, dp and tp once each, fastest first, as 'tp,dp,pp' does$"),
        ({"order": "tp,dp,pp,tp"}, r"^order = 'tp,dp,pp,tp' must name"),
        ({"order": ["tp", "dp", "pp"]}, r"^order = \['tp', 'dp', 'pp'\] must name"),
    ],
    ids=str,
)
def test_sizes_and_orders_that_cannot_be_are_refused_on_every_rank_before_any_message(
    sizes, complaint, monkeypatch
) -> None:
    for module in ("pipert.comm.mpi", "pipert.comm.torch_distributed"):
        monkeypatch.setitem(sys.modules, module, None)  # importing either would now be an ImportError

    def fn(transport: LocalTransport) -> dict[str, int]:
        for make in (Mesh.local, Mesh.from_mpi, Mesh.from_torch_distributed):
            with pytest.raises(MeshError, match=complaint):
                make(**sizes)
        with pytest.raises(MeshError, match=complaint):
            Mesh.from_transport(transport, **sizes)
        return dict(transport.counters.messages)

    assert run_ranks(2, fn) == [{}, {}]


def test_numpy_integers_are_sizes_too() -> None:
    assert MeshShape(np.int64(2)) == MeshShape(2)  # type: ignore[arg-type]
    assert str(MeshShape(np.int64(2))) == "pp=2 dp=1 tp=1 order=tp,dp,pp"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "sizes", "start"),
    [
        (4, {"pp": 4, "tp": 2}, "pp*tp*dp = 8 but 4 ranks; start 8 ranks, or choose pp, tp and dp (now 4, 2 and 1)"),
        (4, {"pp": 3}, "pp*tp*dp = 3 but 4 ranks; start 3 ranks"),
        (4, {}, "pp*tp*dp = 1 but 4 ranks"),
        (1, {"dp": 2}, "pp*tp*dp = 2 but 1 rank; start 2 ranks"),
    ],
)
def test_a_mesh_of_another_size_is_refused_on_every_rank_before_any_message(ranks, sizes, start) -> None:
    def fn(transport: LocalTransport) -> dict[str, int]:
        with pytest.raises(MeshError) as caught:
            Mesh.local(**sizes)
        assert str(caught.value).startswith(start)
        assert str(caught.value).endswith(f"whose product is {ranks}")
        return dict(transport.counters.messages)

    assert run_ranks(ranks, fn) == [{}] * ranks


def test_ranks_that_ask_for_different_meshes_are_refused_on_every_rank_before_any_group() -> None:
    def fn(transport: LocalTransport) -> int:
        with pytest.raises(MeshError, match=r"rank 0 for pp=4 dp=1 tp=1 .*, rank 2 for pp=2 dp=2 tp=1"):
            Mesh.local(pp=2, dp=2) if transport.rank == 2 else Mesh.local(pp=4)
        return transport.counters.messages["split"]

    assert run_ranks(4, fn) == [0] * 4


def test_coordinates_outside_the_mesh_are_refused() -> None:
    shape = MeshShape(2, 2)
    with pytest.raises(MeshError, match=r"pp = 2 lies outside the mesh pp=2 dp=2 tp=1 .*; use 0 to 1"):
        shape.rank_of(pp=2)
    with pytest.raises(MeshError, match="dp = -1 lies outside"):
        shape.rank_of(dp=-1)
    with pytest.raises(MeshError, match="rank 4 lies outside"):
        shape.coordinates(4)


# ---- groups ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from(ORDERS))
def test_groups_hold_the_ranks_that_differ_along_one_axis_alone(pp: int, dp: int, tp: int, order: str) -> None:
    def fn(transport: LocalTransport) -> None:
        mesh = Mesh.local(pp, dp, tp, order=order)
        assert mesh.world is transport
        assert (mesh.rank, mesh.size) == (transport.rank, pp * dp * tp)
        assert (mesh.pp_rank, mesh.dp_rank, mesh.tp_rank) == mesh.coordinates
        groups = {"pp": mesh.pp_group, "dp": mesh.dp_group, "tp": mesh.tp_group}
        for axis, group in groups.items():
            assert (group.rank, group.size) == (getattr(mesh.coordinates, axis), getattr(mesh, axis))
            members = [int(blob) for blob in group.exchange(str(mesh.rank).encode())]
            assert members == [mesh.rank_of(**{axis: place}) for place in range(group.size)]
        for axis, group in groups.items():
            total = torch.tensor([1.0])
            group.wait(group.iallreduce(total))
            assert total.item() == getattr(mesh, axis)
        mesh.close()
        mesh.close()
        mesh.world.barrier()  # the caller's still

    run_ranks(pp * dp * tp, fn)


def test_every_rank_makes_its_groups_in_one_order_with_no_messages_later() -> None:
    def fn(transport: LocalTransport) -> list[int]:
        before = transport.counters.messages["split"]
        mesh = Mesh.local(pp=2, dp=2)
        made = transport.counters.messages["split"] - before
        assert isinstance(mesh.tp_group, SingleTransport)
        mesh.pp_group.barrier()
        mesh.dp_group.barrier()
        mesh.tp_group.barrier()
        return [made, transport.counters.messages["split"] - before]

    assert run_ranks(4, fn) == [[2, 2]] * 4


def test_a_mesh_is_a_value() -> None:
    def fn(transport: LocalTransport) -> bool:
        one, two = Mesh.local(pp=2, dp=2), Mesh.local(pp=2, dp=2)
        with pytest.raises(FrozenInstanceError):
            one.rank = 3  # type: ignore[misc]
        return one == two and hash(one) == hash(two) and one != Mesh.local(pp=4)

    assert all(run_ranks(4, fn))
    texts = run_ranks(4, lambda transport: str(Mesh.local(pp=2, dp=2)))
    assert texts[3] == "rank 3 of 4: pp 1/2, dp 1/2, tp 0/1"


def test_thirty_six_ranks_make_a_mesh() -> None:
    def fn(transport: LocalTransport) -> Coordinates:
        mesh = Mesh.local(pp=4, dp=3, tp=3)
        mesh.pp_group.barrier()
        return mesh.coordinates

    assert len(set(run_ranks(36, fn))) == 36


# ---- one rank --------------------------------------------------------------------------------------------------------


def test_outside_of_run_ranks_a_local_mesh_is_a_world_of_one() -> None:
    mesh = Mesh.local()
    assert (mesh.rank, mesh.size, mesh.coordinates) == (0, 1, (0, 0, 0))
    assert mesh.world.exchange(b"a") == [b"a"]
    with pytest.raises(MeshError, match=r"pp\*tp\*dp = 4 but 1 rank"):
        Mesh.local(pp=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_collectives_of_a_single_rank_give_back_the_input_bit_for_bit(dtype: torch.dtype) -> None:
    single = SingleTransport()
    given = torch.tensor([1.0, math.nan, -0.0]).to(dtype)
    reduced, scattered, gathered = given.clone(), torch.zeros_like(given), torch.zeros_like(given)
    for request in (
        single.iallreduce(reduced),
        single.ireduce_scatter(scattered, given),
        single.iallgather(gathered, given),
        single.ibroadcast(reduced, 0),
    ):
        single.wait(request)
        assert request.test()
    for result in (reduced, scattered, gathered):
        assert torch.equal(result.view(torch.uint8), given.view(torch.uint8))


def test_a_single_rank_refuses_what_larger_groups_refuse() -> None:
    single = SingleTransport()
    with pytest.raises(MessageError, match=r"a group of one sends to rank 1, but there is nobody else"):
        single.isend(torch.zeros(1), 1, 0)
    with pytest.raises(MessageError, match="receives from rank 0"):
        single.irecv(torch.zeros(1), 0, 0)
    with pytest.raises(MessageError, match="not contiguous"):
        single.iallreduce(torch.zeros(2, 2).t())
    with pytest.raises(MessageError, match="not a reduction"):
        single.iallreduce(torch.zeros(2), "mean")
    with pytest.raises(MessageError, match="elements"):
        single.iallgather(torch.zeros(2), torch.zeros(1))
    with pytest.raises(MessageError, match="root = 1"):
        single.ibroadcast(torch.zeros(1), 1)
    assert single.split(None, 0) is None
    assert single.split(3, 0).size == 1  # type: ignore[union-attr]


def test_a_single_rank_passes_reports_aborts_and_waits_on_to_its_job() -> None:
    def fn(transport: LocalTransport) -> None:
        mesh = Mesh.local(pp=2)
        alone = mesh.tp_group
        if transport.rank == 0:
            alone.report("0F3")
            alone.wait(mesh.pp_group.irecv(torch.zeros(1), 1, 0), "0RECV_B3")
            alone.wait(mesh.pp_group.irecv(torch.zeros(1), 1, 1), "0RECV_B4")
        else:
            transport.wait(mesh.pp_group.isend(torch.zeros(1), 0, 0))
            alone.abort(RuntimeError("enough"))
            alone.progress()

    outcomes = run_ranks(2, fn, return_exceptions=True)
    assert "rank 1 failed first: RuntimeError: enough" in str(outcomes[0])
    assert "enough" in str(outcomes[1])
    with pytest.raises(TransportError, match="no other rank can complete"):
        run_ranks(2, lambda t: SingleTransport().wait(t.irecv(torch.zeros(1), 0, 0)), leftovers="ignore")


# ---- over MPI --------------------------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_mpi_ranks_form_a_mesh_and_refuse_wrong_ones_within_ten_seconds() -> None:
    script = """
        import json, os
        from pipert import Mesh
        from pipert.comm.errors import MeshError

        refused = []
        for sizes in ({"pp": 4, "tp": 2}, {"pp": 3}, {"pp": 0}, {"pp": -1}):
            try:
                Mesh.from_mpi(**sizes)
            except MeshError as error:
                refused.append(str(error))
        mesh = Mesh.from_mpi(pp=2, dp=2, deadline=20)
        own = str(mesh.rank).encode()
        groups = [[int(b) for b in g.exchange(own)] for g in (mesh.pp_group, mesh.dp_group, mesh.tp_group)]
        line = json.dumps([mesh.rank, list(mesh.coordinates), groups, refused])
        mesh.close()
        os.write(1, line.encode() + b"\\n")
    """
    result = run_mpi(4, script, check=True)
    found = sorted(json.loads(line) for line in result.stdout.splitlines())
    shape = MeshShape(2, 2)
    assert [entry[:2] for entry in found] == [[rank, list(shape.coordinates(rank))] for rank in range(4)]
    for rank, _, groups, refused in found:
        assert groups == [list(shape.group(axis, rank)) for axis in ("pp", "dp", "tp")]  # type: ignore[arg-type]
        assert [text.split(";")[0] for text in refused] == [
            "pp*tp*dp = 8 but 4 ranks",
            "pp*tp*dp = 3 but 4 ranks",
            "pp = 0 is not a number of ranks",
            "pp = -1 is not a number of ranks",
        ]
