"""A fleet on a Ray cluster that is changed, and loses its parts, while it serves: no request is answered wrongly, and
none fails but those that a killed router was answering. Nothing of it is left in the end.

`KVFERRY_FAULTS` says how many changes at random (a quarter of it), `KVFERRY_SEED` which.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import ModelMaker
from kvferry.fleet.places import ledger_of
from kvferry.fleet.processes.start_time import started_at
from support.fleets import Load, change_at_random, require_clean, use_state_in
from support.processes import KvferryProcess, begun, run
from support.ray_fleets import ACTOR, NAME, PROCESS, RayFleet, SharedFleet, eventually, fleet_on, replaced
from support.ray_nodes import Nodes, ray_nodes, runs
from support.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(900)]

NUM_CHANGES = max(4, int(os.environ.get("KVFERRY_FAULTS", "0")) // 4)
SEED = int(os.environ.get("KVFERRY_SEED", "1"))
NUM_NODES = 3


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(NUM_NODES, cpus=3) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def shared(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory, model_maker: ModelMaker) -> Iterator[SharedFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patch:
        use_state_in(folder, patch)
        one = SharedFleet(lambda: fleet_on(nodes, folder, model_maker("llama")))
        yield one
        one.end()


@pytest.fixture
def fleet(shared: SharedFleet) -> Iterator[RayFleet]:
    """One P and one D. Their names are those that were free."""
    with shared.borrowed() as made:
        yield made


@pytest.fixture
def free_nodes(shared: SharedFleet, nodes: Nodes) -> Nodes:
    """The cluster, without the fleet."""
    shared.end()
    return nodes


@pytest.fixture
def short_lived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    use_state_in(tmp_path, monkeypatch)
    with ray_nodes(2, cpus=3) as nodes:
        yield nodes


@contextmanager
def served_on(nodes: Nodes, folder: Path, model: Path) -> Iterator[KvferryProcess]:
    """`kvferry serve`, once it serves."""
    engine = ("--dtype=float32", "--kv-cache-memory=32MiB", "--served-model-name=m", "--grace-s=5")
    where = ("--prefill=1", "--decode=1", "--backend=ray", f"--address={nodes.address}")
    with begun("serve", str(model), *engine, *where, log=folder / "log", ends_cleanly=False, start_s=400) as ready:
        served = ready()
        assert sorted(nodes.members()) == ["decode-0", "prefill-0", "router-0", "router-1"]
        yield served


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_serve_is_the_whole_command_and_leaves_nothing(
    number: signal.Signals, free_nodes: Nodes, tmp_path: Path, model_maker: ModelMaker
) -> None:
    """It is asked to end, or is killed."""
    with served_on(free_nodes, tmp_path, model_maker("llama")) as served:
        started = {(pid, started_at(pid)) for pair in free_nodes.members().values() for pid in pair}
        assert len(served.complete("a prompt")["choices"][0]["token_ids"]) == 12
        if number == signal.SIGTERM:
            assert served.stop() == 0, served.log
        else:
            served.kill()
        until(lambda: not any(runs(*one) for one in started), 60, lambda: served.log)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_although_the_control_service_hangs(
    number: signal.Signals, free_nodes: Nodes, tmp_path: Path, model_maker: ModelMaker
) -> None:
    """Its members are gone when it ends, and their actors once the service answers again. It takes longer than three
    seconds, after which Ray would abort a process that has received SIGTERM."""
    service = psutil.Process(free_nodes.head.all_processes["gcs_server"][0].process.pid)
    with served_on(free_nodes, tmp_path, model_maker("llama")) as served:
        pairs = free_nodes.members().values()
        actors, members = ({(pair[which], started_at(pair[which])) for pair in pairs} for which in (ACTOR, PROCESS))
        service.suspend()
        try:
            served.kill(number)
            assert served.wait() == 0, served.log
            assert not any(runs(*one) for one in members)
        finally:
            service.resume()
        until(lambda: not any(runs(*one) for one in actors), 60, lambda: served.log)


def test_the_control_service_is_killed(short_lived: Nodes, tmp_path: Path, model_maker: ModelMaker) -> None:
    with fleet_on(short_lived, tmp_path, model_maker("llama")) as fleet:
        with Load(fleet.status.url) as load:
            service = short_lived.head.all_processes["gcs_server"][0].process
            service.kill()
            service.wait()
            until(lambda: "control service (GCS) has not answered" in fleet.log, 60, lambda: fleet.log)
            num_answers = load.num_answers
            until(lambda: load.num_answers > num_answers + 20, 30, lambda: fleet.log)
        assert load.wrong == []
        short_lived.cluster.shutdown()


def test_it_is_scaled_and_instances_change_their_roles(fleet: RayFleet) -> None:
    with Load(fleet.status.url) as load:
        fleet.scale("prefill=2", "decode=2")
        before = fleet.processes()
        fleet.scale("prefill=1", "decode=3")
        assert fleet.processes() == before
        assert len(fleet.ready("decode")) == 3
    assert load.wrong == []
    assert load.num_answers > 10
    require_clean(fleet)


def test_an_actor_and_a_controller_are_killed(fleet: RayFleet) -> None:
    before, (name,) = fleet.processes(), fleet.names("decode")
    with Load(fleet.status.url) as load:
        actor, pid = before[name]
        started = started_at(pid)
        os.kill(actor, signal.SIGKILL)
        until(lambda: not runs(pid, started), 10, lambda: fleet.log)
        replaced(fleet, before, name)
        os.kill(fleet.status.pid, signal.SIGKILL)
        until(lambda: not ledger_of(NAME).has_controller, 10)
        num_answers, there = load.num_answers, fleet.processes()
        until(lambda: load.num_answers > num_answers + 5, 60)
        fleet.settle()
        assert fleet.processes() == there
    assert load.wrong == []


def test_a_node_is_killed(fleet: RayFleet, nodes: Nodes) -> None:
    fleet.scale("prefill=2", "decode=2")
    with Load(fleet.status.url) as load:
        node = a_node(fleet, nodes)
        nodes.cluster.remove_node(node, allow_graceful=False)
        try:
            eventually(fleet, lambda: not on(fleet, node), 60)
            fleet.settle()
            num_answers = load.num_answers
            until(lambda: load.num_answers > num_answers + 5, 60, lambda: fleet.log)
        finally:
            nodes.add()  # for the tests that follow
    assert load.wrong == []
    require_clean(fleet)


def test_a_node_hangs(fleet: RayFleet, nodes: Nodes) -> None:
    """It is replaced before Ray sees it; when it runs again, nothing of the fleet is left there."""
    fleet.scale("prefill=2", "decode=2")
    node = a_node(fleet, nodes)
    raylet = psutil.Process(raylet_of(node))
    hung = [raylet, *raylet.children(recursive=True)]
    num_events = len([*ledger_of(NAME).history()])
    with Load(fleet.status.url) as load:
        for one in hung:
            one.suspend()
        try:
            eventually(fleet, lambda: not on(fleet, node), 60)
            events = [*ledger_of(NAME).history()][num_events:]
            assert any(one.what == "stop" and "GET /health" in one.reason for one in events)
            fleet.settle()
        finally:
            for one in hung:
                one.resume()
        num_answers = load.num_answers
        until(lambda: load.num_answers > num_answers + 5, 60)
    assert load.wrong == []
    there = {pid for pair in fleet.processes().values() for pid in pair}
    until(lambda: not {one.pid for one in hung if one.is_running()} & there, 60)
    require_clean(fleet)


def test_the_control_service_hangs(nodes: Nodes, fleet: RayFleet) -> None:
    """What serves goes on, nothing is started nor held against anybody, the fleet says why, and recovers."""
    fleet.scale("decode=2")
    stays, lost = fleet.names("decode")
    service = psutil.Process(nodes.head.all_processes["gcs_server"][0].process.pid)
    with Load(fleet.status.url) as load:
        before = fleet.processes()
        service.suspend()
        try:
            eventually(fleet, lambda: any("control service" in one for one in fleet.status.trouble), 60)
            assert "control service (GCS) has not answered" in run("fleet", "status", NAME).stdout
            os.kill(before[lost][PROCESS], signal.SIGKILL)
            eventually(fleet, lambda: fleet.names("decode") == [stays], 30)
            num_answers = load.num_answers
            until(lambda: load.num_answers > num_answers + 10, 30, lambda: fleet.log)
        finally:
            service.resume()
        fleet.settle()
        assert fleet.status.trouble == ()
        assert len(fleet.names("decode")) == 2
        assert fleet.processes()[stays] == before[stays]
    assert load.wrong == []
    require_clean(fleet)


def test_a_router_is_killed_and_the_other_goes_on(fleet: RayFleet) -> None:
    """Its actor, and then another's process. Nothing fails but what the killed one was answering."""
    for number, which in enumerate((ACTOR, PROCESS)):
        with Load(fleet.status.url) as load:
            before, name = fleet.processes(), fleet.names("router")[number]
            os.kill(before[name][which], signal.SIGKILL)
            replaced(fleet, before, name)
            num_answers = load.num_answers
            until(lambda: load.num_answers > num_answers + 20, 60, lambda: fleet.log)  # noqa: B023
        assert all("Error" in one for one in load.wrong), load.wrong  # of a connection; no answer is wrong
        assert len(load.wrong) <= load.num_clients
    require_clean(fleet)


def test_all_routers_are_killed_at_once_and_the_next_ones_hear_of_all_instances(fleet: RayFleet) -> None:
    """Nobody holds the address any more: the next routers have another one, with which clients go on."""
    before, url = fleet.processes(), fleet.status.url
    routers = fleet.names("router")
    assert len(routers) == 2
    for name in routers:
        os.kill(before[name][ACTOR], signal.SIGKILL)
    replaced(fleet, before, *routers)
    assert fleet.status.url != url
    with Load(fleet.status.url) as load:
        until(lambda: load.num_answers > 10, 60, lambda: fleet.log)
    assert load.wrong == []
    after = fleet.processes()
    assert all(after[name] == before[name] for name in before if name not in routers)
    require_clean(fleet)


def test_of_two_controllers_one_acts_and_the_other_takes_over(
    fleet: RayFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep what they know apart, as on two machines. The one that acts is killed; the next one is stopped, and
    finds out when it goes on that it is too late. Nothing is started twice."""
    states = [fleet.folder / "state", tmp_path / "other state"]

    @contextmanager
    def on(machine: int) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setenv("KVFERRY_STATE_DIR", str(states[machine]))
            yield

    def waits(machine: int, number: int) -> bool:
        """For the so-manieth time."""
        with on(machine):
            return sum(one.what == "waits" for one in ledger_of(NAME).history()) >= number

    def acts(machine: int) -> bool:
        with on(machine):
            seen = ledger_of(NAME).status()
            return seen is not None and seen.settled

    def pid(machine: int) -> int:
        with on(machine):
            holder = ledger_of(NAME).controller
            assert holder is not None
            return holder.pid

    pids = list[int]()
    with Load(fleet.status.url) as load:
        try:
            with on(1):
                fleet.does("apply", str(fleet.folder / "spec.toml"), "--wait-s=0")
            until(lambda: waits(1, 1), 60)
            pids.append(pid(1))
            before = fleet.processes()
            os.kill(pid(0), signal.SIGKILL)
            until(lambda: acts(1), 90)
            assert fleet.processes() == before

            fleet.does("resume", NAME, "--wait-s=0")
            until(lambda: waits(0, 1), 60)
            assert "looks after this fleet; changes made on this machine" in run("fleet", "status", NAME).stdout
            os.kill(pids[0], signal.SIGSTOP)
            until(lambda: acts(0), 90, lambda: fleet.log)
            assert fleet.processes() == before
            (name,) = fleet.names("decode")
            os.kill(before[name][PROCESS], signal.SIGKILL)
            replaced(fleet, before, name)
            between = fleet.processes()
            os.kill(pids[0], signal.SIGCONT)
            until(lambda: waits(1, 2), 60)
            assert fleet.processes() == between
            with on(1):
                events = ledger_of(NAME).history()
            assert not [one for one in events if one.what in ("start", "stop")]
        finally:
            for one in pids:
                os.kill(one, signal.SIGKILL)
    assert load.wrong == []
    require_clean(fleet)


@pytest.mark.timeout(4 * 3600)
def test_random_changes(fleet: RayFleet, nodes: Nodes) -> None:
    """An actor is struck, or its member; and nodes are lost."""
    rng = random.Random(SEED)

    def strike(member: str, number: int) -> None:
        if pair := fleet.processes().get(member):
            with suppress(ProcessLookupError):
                os.kill(rng.choice(pair), number)

    def lose_node() -> None:
        left = to_lose(fleet, nodes)
        if left and fleet.may_strike(*on(fleet, node := rng.choice(left))):
            nodes.cluster.remove_node(node, allow_graceful=False)
            nodes.add()

    change_at_random(fleet, rng, NUM_CHANGES, strike, lose_node)


def on(fleet: RayFleet, node: Any) -> list[str]:
    """The members that serve on a node."""
    return [one.name for one in fleet.status.members if f"//{node.node_ip_address}:" in one.url]


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def to_lose(fleet: RayFleet, nodes: Nodes) -> list[Any]:
    """The nodes without Ray's control service, and without the controller and its routers."""
    routers = {psutil.Process(actor).ppid() for name, (actor, _) in fleet.processes().items() if "router" in name}
    return [one for one in nodes.cluster.list_all_nodes() if one is not nodes.head and raylet_of(one) not in routers]


def a_node(fleet: RayFleet, nodes: Nodes) -> Any:
    """One that can be lost, and has an instance."""
    return next(one for one in to_lose(fleet, nodes) if on(fleet, one))
