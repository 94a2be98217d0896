"""The rules of `PolicySchedule` in random orders of what a trainer, a generating thread and evaluations do, and the
waiting of `PolicyTurns`.

The actors follow the stages of the flow. Each is a generator that yields a condition, and continues at any time at
which the condition holds; hypothesis chooses who continues. Nothing waits for real time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.policy_schedule import EngineUse, PolicyLimits, PolicySchedule, PolicyTurns

Actor = Iterator[Callable[[], bool]]


@dataclass(frozen=True)
class Mode:
    lead: int
    interval: int
    streams: bool = False
    apart: bool = False
    evaluated: frozenset[int] = frozenset()  # versions

    @property
    def bound(self) -> int:
        return self.lead if self.streams else self.lead + self.interval - 1


@dataclass
class Commits:
    """What outlives a kill."""

    rollouts: list[int] = field(default_factory=list)  # the oldest version of each round's tokens
    trained: int = 0
    evaluations: list[int] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


@dataclass
class World:
    """One start of a run: its actors share a schedule and the commits of earlier starts."""

    mode: Mode
    commits: Commits
    num_rounds: int

    def __post_init__(self) -> None:
        mode, trained = self.mode, self.commits.trained
        self.schedule = PolicySchedule(
            PolicyLimits(mode.lead, mode.bound, mode.interval, mode.streams, mode.apart), trained=trained
        )
        self.handed_over: set[int] = set()
        self.engines = {"rollouts": -1, "evaluations": -1}  # versions that the scripted engines really have
        self.using: dict[str, int] = {}  # pinned versions: user -> version
        self.actors: dict[str, Actor] = {"trainer": self.trainer()}
        if mode.lead:
            self.actors["generator"] = self.stream() if mode.streams else self.generator()

    # ---- the actors --------------------------------------------------------------------------------------------------

    def send(self, pool: str, version: int, *, may_be_late: bool = False) -> Actor:
        """Send a version. `may_be_late`: do nothing if the trainer has trained further before."""
        yield self.schedule.may_send
        schedule = self.schedule
        assert not schedule.is_training and not schedule.num_sending
        if may_be_late and schedule.trained != version:
            return
        assert schedule.trained == version, f"version {version} is sent, but the trainer has {schedule.trained}"
        schedule.num_sending += 1
        yield lambda: True
        assert not schedule.is_training
        for user, pinned in self.using.items():
            assert pool not in user or pinned == version, f"{user} needs {pinned}, and {version} is sent"
        self.engines[pool] = version
        schedule.num_sending -= 1

    def load(self, pool: str, version: int, *, may_be_late: bool = False) -> Actor:
        if self.engines[pool] != version:
            yield from self.send(pool, version, may_be_late=may_be_late)
        if self.engines[pool] == version:
            self.schedule.weights_sent(getattr(self.schedule, pool), version)

    def generator(self) -> Actor:
        schedule = self.schedule
        for r in range(len(self.commits.rollouts), self.num_rounds):
            yield from self.evaluate_requests(r)
            yield from self.generate(r)
            schedule.next_rollout = r + 1 if r + 1 < self.num_rounds else None
        yield from self.evaluate_requests(None)

    def evaluate_requests(self, r: int | None) -> Actor:
        schedule = self.schedule
        while True:
            yield lambda: schedule.requested is not None or schedule.version_for(r) is not None or self.is_over(r)
            if self.is_over(r) and schedule.requested is None:
                return
            if (version := schedule.take_request()) is None:
                return
            schedule.evaluated = version
            yield from self.evaluate(version)
            schedule.evaluated, schedule.is_reserved = None, False

    def is_over(self, r: int | None) -> bool:
        return r is None and "trainer" not in self.actors

    def generate(self, r: int) -> Actor:
        schedule, pool = self.schedule, self.schedule.rollouts
        yield lambda: schedule.version_for(r) is not None
        version = schedule.begin_rollout(r)
        yield lambda: schedule.may_use(pool, version) == "open"
        schedule.open_pool(pool, version)
        yield from self.load("rollouts", version)
        self.using["rollouts"] = version
        yield lambda: True
        del self.using["rollouts"]
        schedule.is_reserved = False
        yield from self.close(pool)
        assert self.engines["rollouts"] == version
        self.commit_rollout(r, version)

    def commit_rollout(self, r: int, version: int) -> None:
        assert len(self.commits.rollouts) == r, "rounds are committed in their order"
        assert 0 <= r - version <= self.mode.bound
        self.commits.rollouts.append(version)
        self.commits.order.append(f"rollout {r}")

    def stream(self) -> Actor:
        """Groups in flight keep the version that started them; a round takes those that are new enough."""
        schedule, pool = self.schedule, self.schedule.rollouts
        yield lambda: schedule.may_use(pool, None) == "open"
        yield from self.load("rollouts", schedule.open_pool(pool, None))
        for r in range(len(self.commits.rollouts), self.num_rounds):
            yield lambda r=r: (schedule.in_engines or 0) >= r - self.mode.bound  # type: ignore[misc]
            assert schedule.in_engines is not None
            self.commit_rollout(r, schedule.in_engines)
        yield lambda: schedule.evaluated is None
        yield from self.close(pool)

    def trainer(self) -> Actor:
        schedule = self.schedule
        if not self.commits.order:
            yield from self.evaluate_now(0)
        for r in range(max(0, self.commits.trained - 1), self.num_rounds):
            if self.mode.lead == 0 and r == len(self.commits.rollouts):
                yield from self.generate(r)
            yield lambda r=r: r < len(self.commits.rollouts)  # type: ignore[misc]
            yield schedule.may_train
            schedule.is_training = True
            yield lambda: True
            assert not schedule.num_sending, "weights are sent while a round is trained"
            if r == self.commits.trained:
                self.commits.trained += 1
                self.commits.order.append(f"train {r}")
            schedule.is_training, schedule.trained = False, max(schedule.trained, r + 1)
            yield from self.after(r + 1)
        yield lambda: schedule.evaluated is None and schedule.requested is None and not schedule.rollouts.streams
        yield from self.evaluate_now(self.num_rounds)

    def after(self, version: int) -> Actor:
        schedule, mode = self.schedule, self.mode
        if mode.streams and version % mode.interval == 0 and version < self.num_rounds:
            yield from self.update_in_flight(version, may_skip=True)
        if version not in mode.evaluated or version in self.commits.evaluations or version == self.num_rounds:
            return
        if not mode.apart and not mode.streams:
            if mode.lead == 0:
                yield from self.evaluate_now(version)
            else:
                schedule.requested = version
            return
        if mode.apart:
            yield lambda: schedule.evaluated is None
            yield from self.send("evaluations", version)
        else:
            yield from self.update_in_flight(version, may_skip=False)
        schedule.evaluated = version
        self.actors[f"evaluation {version}"] = self.evaluate_beside(version)

    def update_in_flight(self, version: int, *, may_skip: bool) -> Actor:
        schedule = self.schedule
        yield lambda: schedule.may_update_in_flight(may_skip=may_skip) != "wait"
        if schedule.may_update_in_flight(may_skip=may_skip) == "send":
            yield from self.send("rollouts", version)
            schedule.weights_sent(schedule.rollouts, version)

    def evaluate_beside(self, version: int) -> Actor:
        yield from self.evaluate(version)
        self.schedule.evaluated = None

    def evaluate_now(self, version: int) -> Actor:
        if version not in self.commits.evaluations:
            yield from self.evaluate(version)

    def evaluate(self, version: int) -> Actor:
        schedule = self.schedule
        name = "evaluations" if self.mode.apart else "rollouts"
        pool: EngineUse = getattr(schedule, name)
        yield lambda: schedule.may_use(pool, version) != "wait"
        may = schedule.may_use(pool, version)
        if may == "never":
            return  # postponed to the end of the run, as below if the trainer has trained further
        if may == "open":
            schedule.open_pool(pool, version)
            yield from self.load(name, version, may_be_late=True)
        else:
            pool.num_users += 1
        if self.engines[name] == version:
            self.using[f"{name} evaluation"] = version
            yield lambda: True
            assert self.engines[name] == version, "an evaluation sees its version only"
            del self.using[f"{name} evaluation"]
            self.commits.evaluations.append(version)
            self.commits.order.append(f"evaluate {version}")
        if may == "open":
            yield from self.close(pool)
        else:
            pool.num_users -= 1

    def close(self, pool: EngineUse) -> Actor:
        pool.serves = False
        yield lambda: pool.num_users == 1
        pool.num_users, pool.streams = 0, False

    # ---- the scheduler -----------------------------------------------------------------------------------------------

    def run(self, choose: Callable[[int], int], max_steps: int = 10**6) -> bool:
        """Run the actors; return whether all have ended. `choose`: number of options -> index of one."""
        waiting = {name: next(actor, None) for name, actor in self.actors.items()}
        for _ in range(max_steps):
            self.actors = {name: actor for name, actor in self.actors.items() if waiting.get(name, True) is not None}
            for name, actor in self.actors.items():
                if name not in waiting:
                    waiting[name] = next(actor, None)
            ready = [name for name, condition in waiting.items() if condition is not None and condition()]
            if not any(waiting.values()):
                return True
            assert ready, f"deadlock: {sorted(name for name in waiting if waiting[name])}, {self.schedule}"
            name = ready[choose(len(ready))]
            waiting[name] = next(self.actors[name], None)
        return False


modes = st.builds(
    lambda lead, interval, kind, apart, evaluated: Mode(
        max(1, lead) if kind else lead, min(interval, lead + 1) if kind else interval, kind, apart, evaluated
    ),
    st.integers(0, 4),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.frozensets(st.integers(1, 8)),
)


@given(modes, st.integers(1, 9), st.data())
@settings(max_examples=150, deadline=None)
def test_no_order_of_events_breaks_a_rule_or_blocks_all(mode: Mode, num_rounds: int, data: st.DataObject) -> None:
    """No token older than the bound, no two sends at once, no send while a round is trained, an evaluation sees its
    version only, some action is always possible until the end; also after kills at any moment."""
    commits, chance = Commits(), data.draw(st.randoms(use_true_random=False))
    for num_steps in data.draw(st.lists(st.integers(0, 60), max_size=3)):
        World(mode, commits, num_rounds).run(chance.randrange, num_steps)
    assert World(mode, commits, num_rounds).run(chance.randrange)
    assert (len(commits.rollouts), commits.trained) == (num_rounds, num_rounds)
    kinds = [[int(event.split()[1]) for event in commits.order if kind in event] for kind in ("rollout", "train")]
    assert kinds == [list(range(num_rounds))] * 2
    assert len(set(commits.evaluations)) == len(commits.evaluations)


@given(st.integers(1, 3), st.frozensets(st.integers(1, 6)), st.integers(0, 200), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_synchronous_run_has_one_order_also_after_a_kill(
    interval: int, evaluated: frozenset[int], num_steps: int, chance: object
) -> None:
    mode, whole, killed = Mode(0, interval, evaluated=evaluated), Commits(), Commits()
    World(mode, whole, 6).run(chance.randrange)  # type: ignore[attr-defined]
    World(mode, killed, 6).run(chance.randrange, num_steps)  # type: ignore[attr-defined]
    assert World(mode, killed, 6).run(chance.randrange)  # type: ignore[attr-defined]
    assert killed.order == whole.order
    assert evaluated or whole.rollouts == [r - r % interval for r in range(6)]


# ---- threads ---------------------------------------------------------------------------------------------------------

HANG = 60.0  # seconds; only a deadlock exceeds it


def start(target: Callable[[], object], problems: list[str]) -> threading.Thread:
    """Run `target` in a thread; append its exception to `problems`."""

    def call() -> None:
        try:
            target()
        except BaseException as error:
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(HANG)
    assert not thread.is_alive(), "deadlock"


def enter(block: Callable[[], object]) -> None:
    with block():  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize(
    ("wait", "problem"),
    [
        (lambda turns: turns.wait_for_turn(9), ["Preempted: the run ends"]),
        (lambda turns: enter(lambda: turns.rollout(0)), ["Preempted: the run ends"]),
        (lambda turns: enter(turns.sending), []),
    ],
    ids=["turn", "rollout", "sending"],
)
def test_close_ends_waiting_during_a_round(wait: Callable[[PolicyTurns], object], problem: list[str]) -> None:
    turns, problems = PolicyTurns(PolicySchedule(PolicyLimits(lead=1))), list[str]()
    with turns.training(0):
        expect_end_by_close(turns, lambda: wait(turns), problems)
    assert problems == problem and turns.closed


def test_close_ends_waiting_of_the_training_thread() -> None:
    turns, problems = PolicyTurns(PolicySchedule(PolicyLimits(lead=1), requested=0)), list[str]()  # nobody evaluates it
    expect_end_by_close(turns, lambda: enter(lambda: turns.training(0)), problems)
    assert turns.schedule.trained == 1 and not problems


def expect_end_by_close(turns: PolicyTurns, wait: Callable[[], object], problems: list[str]) -> None:
    thread = start(wait, problems)
    thread.join(0.01)
    assert thread.is_alive(), "it waits"
    turns.close()
    join(thread)


def test_neither_a_failed_round_nor_one_of_an_earlier_start_changes_the_version() -> None:
    turns = PolicyTurns(PolicySchedule(trained=7))
    with pytest.raises(RuntimeError), turns.training(7):
        raise RuntimeError
    assert turns.schedule.trained == 7 and turns.schedule.may_send()
    with turns.training(6):  # the first round of a start is the last trained one
        pass
    assert turns.schedule.version_for(7) == turns.schedule.trained == 7


def test_next_rollout_gets_the_newest_weights_after_a_failure() -> None:
    schedule = PolicySchedule(PolicyLimits(lead=3, bound=5, interval=3), trained=1, in_engines=0)
    turns = PolicyTurns(schedule)
    with pytest.raises(RuntimeError), turns.rollout(2) as version:
        assert version == 0, "version 1 is not due yet"
        raise RuntimeError
    assert schedule.version_for(2) == 1


def test_user_that_opened_the_engines_waits_for_those_that_share_them() -> None:
    turns, problems, order = PolicyTurns(PolicySchedule()), list[str](), list[str]()
    pool = turns.schedule.rollouts
    joined, may_end = threading.Event(), threading.Event()

    def share() -> None:
        with turns.using(pool, 3) as opened:
            assert opened is None
            joined.set()
            assert may_end.wait(HANG)
            order.append("shared")

    def other() -> None:
        with turns.using(pool, 4) as opened:
            order.append(f"opened {opened}")

    with turns.using(pool, 3) as opened:
        assert opened == 3
        threads = [start(share, problems), start(other, problems)]
        assert not joined.wait(0.01), "the engines do not serve yet"
        with turns.change() as schedule:
            schedule.weights_sent(pool, 3)
        assert joined.wait(HANG)
        may_end.set()
    for thread in threads:
        join(thread)
    assert order == ["shared", "opened 4"] and not problems
