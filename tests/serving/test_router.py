"""The router's rule: where the beginning is cached, unless that replica is clearly busier."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from milestone_llm.core.block_hashes import hash_blocks
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.serving.engine.client import EngineRequest
from milestone_llm.serving.replicas.router import BUSIER, Router

SIZE = 4
POLICIES = ("prefix", "round-robin", "random")


def router_of(*names: str, **options) -> Router:
    router = Router(**options)
    for name in names:
        router.add(name)
    return router


def prompt(text: str, salt: str = "") -> list[bytes]:
    """Names of a prompt of one block a letter."""
    return hash_blocks([ord(letter) for letter in text for _ in range(SIZE)], SIZE, salt)


def ask(router: Router, text: str, num_tokens: int = 10, salt: str = "") -> str:
    """Send a prompt that ends at once."""
    name = router.choose(prompt(text, salt), num_tokens)
    router.note_finished(name, num_tokens)
    return name


# --- where the beginning is ---------------------------------------------------------------------


def test_the_same_beginning_goes_to_the_same_replica_while_it_is_idle():
    router = router_of("r0", "r1", "r2")
    first = {text: ask(router, text) for text in ("AAA", "BBB", "CCC")}
    assert len(set(first.values())) == 3  # none is busy: who has most room in its cache
    for end in "XYZ":
        for text, name in first.items():
            assert ask(router, text + end) == name


def test_the_longest_beginning_counts():
    router = router_of("r0", "r1")
    longer = router.choose(prompt("AB"), 100)
    shorter = router.choose(prompt("A"), 1)  # the first is too busy
    assert shorter != longer
    router.note_finished(longer, 100)
    router.choose(prompt("AB"), 5)
    assert router.num_outstanding(longer) > router.num_outstanding(shorter)
    assert ask(router, "ABZ") == longer
    assert router.num_cached(longer, prompt("ABZQ")) == 3
    assert router.num_cached(shorter, prompt("ABZQ")) == 1


def test_salts_keep_prompts_apart():
    router = router_of("r0", "r1")
    first = ask(router, "AAAA", salt="alice")
    second = ask(router, "AAAA", salt="bob")
    assert first != second
    assert router.num_cached(first, prompt("AAAA", "bob")) == 0
    assert ask(router, "AAAA", salt="alice") == first


# --- unless it is clearly busier ----------------------------------------------------------------


def test_a_busier_replica_is_left_at_the_bound_that_is_stated():
    router = router_of("r0", "r1")
    held = router.choose(prompt("A"), 40)
    (other,) = {"r0", "r1"} - {held}
    router.choose(prompt("B"), 30)
    # mean 35: at most 1.25 * 35 + 10 = 53.75
    assert router.choose(prompt("AC"), 10) == held  # has 40
    # mean 40: at most 60
    assert router.choose(prompt("AD"), 10) == held  # has 50
    # mean 45: at most 1.25 * 45 + 3 = 59.25
    assert router.choose(prompt("AE"), 3) == other  # the first has 60


def test_when_the_longest_beginning_is_too_busy_the_next_longest_counts():
    router = router_of("r0", "r1", "r2")
    trunk = router.choose(prompt("A"), 10)
    router.note_finished(trunk, 10)
    router.choose(prompt("A"), 60)
    branch = router.choose(prompt("AB"), 1)  # the trunk's holder is too busy: somebody else has AB
    assert branch != trunk
    router.note_finished(trunk, 60)
    (cold,) = {"r0", "r1", "r2"} - {trunk, branch}
    router.choose(prompt("AB"), 99)
    assert router.num_outstanding(branch) == 100
    assert router.choose(prompt("ABC"), 1) == trunk  # which has A at least
    assert router.num_outstanding(cold) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.text("AB", max_size=4), st.integers(1, 50)), max_size=60),
)
def test_no_replica_gets_more_than_the_bound_whatever_comes(num_replicas, prompts):
    router = router_of(*(f"r{i}" for i in range(num_replicas)))
    total = 0
    for text, num_tokens in prompts:
        name = router.choose(prompt(text), num_tokens)
        before = router.num_outstanding(name) - num_tokens
        assert before <= BUSIER * total / num_replicas + num_tokens
        total += num_tokens


# --- what it remembers --------------------------------------------------------------------------


def test_the_end_of_the_oldest_prompt_is_forgotten_first():
    router = router_of("r0", max_blocks=4)
    ask(router, "ABC")
    ask(router, "XY")
    assert router.num_cached("r0", prompt("ABC")) == 2
    assert router.num_cached("r0", prompt("XY")) == 2
    ask(router, "ABCDEFG")
    assert router.num_cached("r0", prompt("ABCDEFG")) == 4  # its own end does not fit either


def test_a_request_counts_for_no_more_tokens_than_it_can_get():
    """Or whoever asks for a million would have a replica to himself."""
    for max_tokens, num_tokens in ((10, 3 + 2 * 10), (10**6, 3 + 2 * 61)):
        params = SamplingParams(n=2, max_tokens=max_tokens)
        assert EngineRequest("r", [3, 4, 5], params).most_tokens(64) == num_tokens


# --- the other policies -------------------------------------------------------------------------


def test_the_others_know_nothing_of_beginnings():
    router = router_of("r0", "r1", "r2", policy="round-robin")
    assert [ask(router, "A") for _ in range(5)] == ["r0", "r1", "r2", "r0", "r1"]
    router = router_of("r0", "r1", policy="random")
    assert {ask(router, "A") for _ in range(30)} == {"r0", "r1"}


# --- any order of events ------------------------------------------------------------------------


class Traffic(RuleBasedStateMachine):
    """Replicas and requests come and go; the books are reckoned anew after each event."""

    @initialize(policy=st.sampled_from(POLICIES), max_blocks=st.integers(2, 12))
    def build(self, policy: str, max_blocks: int) -> None:
        self.router = Router(policy, max_blocks=max_blocks)
        self.max_blocks = max_blocks
        self.alive: list[str] = []
        self.running: list[tuple[str, int]] = []
        self.num_added = 0

    @rule()
    def add(self) -> None:
        self.alive.append(f"r{self.num_added}")
        self.num_added += 1
        self.router.add(self.alive[-1])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.alive))
        self.alive.remove(name)
        self.router.remove(name)

    @precondition(lambda self: self.alive)
    @rule(text=st.text("AB", max_size=8), num_tokens=st.integers(1, 9), salt=st.sampled_from("ab"))
    def choose(self, text: str, num_tokens: int, salt: str) -> None:
        name = self.router.choose(prompt(text, salt), num_tokens)
        assert name in self.alive
        self.running.append((name, num_tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.running) - 1))
        self.router.note_finished(*self.running.pop(place))

    @invariant()
    def books_are_right(self) -> None:
        loads = Counter(dict.fromkeys(self.alive, 0))
        for name, num_tokens in self.running:
            if name in loads:
                loads[name] += num_tokens
        assert loads == {name: self.router.num_outstanding(name) for name in self.router.replicas}
        replicas = self.router._replicas.values()
        assert all(len(replica.blocks) <= self.max_blocks for replica in replicas)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("AB", min_size=1, max_size=8), max_size=20), st.integers(2, 6))
def test_who_has_a_block_has_those_before_it(texts, max_blocks):
    router = router_of("r0", "r1", max_blocks=max_blocks)
    for text in texts:
        router.choose(prompt(text), 1)
        for name, replica in router._replicas.items():
            known = router.num_cached(name, prompt(text))
            assert sum(block in replica.blocks for block in prompt(text)) == known
