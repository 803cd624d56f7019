"""KV with several lifetimes: layers with a window give blocks back.

Schedulers run on the runner that reads every KV position back, in each group of layers.
"""

import pytest
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import m4_prefix_chunked
import m5_kernels
from helpers.engines import (
    greedy,
    hf_generate,
    hf_greedy,
    make_engine,
    random_prompts,
    tiny_model,
)
from helpers.schedulers import Life, assert_tokens, of_length, prompt, request_of
from m4_prefix_chunked.config import EngineConfig
from m4_prefix_chunked.hybrid.hybrid_cache import HybridKVCacheManager, grouped_scheduler
from m4_prefix_chunked.hybrid.layer_groups import LayerGroups
from m4_prefix_chunked.scheduler import Scheduler
from m5_kernels.decoder.config import DecoderConfig
from milestone_llm.core.errors import PlanError
from milestone_llm.core.kv import NULL_BLOCK, tables_of
from milestone_llm.core.plan_rules import check_plan
from milestone_llm.lab.families import build_small_model
from milestone_llm.models.kv_shape import KVShape
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model

SIZE = 4


def hybrid_life(num_blocks=40, windows=(None, 6), max_model_len=48, **fields):
    """Return a scheduler over groups with these windows, with its device."""
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": SIZE, **fields}
    groups = LayerGroups(windows, tuple((layer,) for layer in range(len(windows))))
    config = EngineConfig(**fields)
    life = Life(scheduler=grouped_scheduler(Scheduler, config, max_model_len, num_blocks, groups))
    life.device.windows = windows
    return life


def tables(life, name):
    return tables_of(life.kv.blocks.block_tables[name])


def num_held(life, name):
    return [sum(block != NULL_BLOCK for block in table) for table in tables(life, name)]


BOTH = pytest.mark.parametrize("windows", [(None, 6), (6,)], ids=["some", "all"])
"""Some layers have a window, or all have it."""


# --- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ("wfwf", [(1, 3), (0, 2)]),
        ("wwwwwf" * 2, [(5, 11), (0, 1), (2, 3), (4, 6), (7, 8), (9, 10)]),
        ("wwwf", [(3,), (0,), (1,), (2,)]),
        ("fffww", [(0, 1), (2,), (3, 4)]),
        ("www", [(0, 1, 2)]),
    ],
)
def test_groups_have_one_window_and_equally_many_layers_except_the_last_of_a_kind(
    windows, expected
):
    groups = LayerGroups.of_windows([8 if each == "w" else None for each in windows])
    assert list(groups.layers) == expected
    assert all(groups.layers[g][p] == layer for layer, (g, p) in enumerate(
        zip(groups.group_of_layers(), groups.place_of_layers(), strict=True)
    ))  # fmt: skip
    # A block of one group takes the memory of its layers: no more than memory has.
    assert groups.num_blocks(10) * groups.size <= 10 * len(windows)


WINDOWED = [
    "mistral",
    "qwen2",
    "phi3",
    "smollm3",
    "olmo3",
    "cohere2",
    "mixtral",
    "dots1",
    "gpt_oss",
]
"""Families of M5's decoder whose config may have a window: of all layers, of some, or of none."""


@pytest.mark.parametrize("family", WINDOWED)
def test_groups_have_the_windows_of_m5s_decoder_and_of_huggingfaces_cache(family):
    config = CONFIG_MAPPING[family](sliding_window=8)
    groups = LayerGroups.of_config(config)
    windows = [groups.windows[group] for group in groups.group_of_layers()]
    layers = DynamicCache(config=config).layers
    assert windows == list(DecoderConfig.from_hf(config).windows)
    assert windows == [getattr(layer, "sliding_window", None) for layer in layers]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"scheduler": object}, "<class 'object'> is no subclass of"),
        ({"disable_hybrid_kv_cache_manager": True}, None),  # as the user wishes
        ({"max_model_len": 24}, None),  # no token is ever before a window
    ],
)
def test_all_blocks_are_kept_where_groups_cannot_be_and_a_line_says_why(fields, reason, caplog):
    own = dict(fields)
    arguments = own.pop("max_model_len", 25), own.pop("scheduler", Scheduler)
    groups = LayerGroups.of_config(build_tiny_model("gemma3").config)
    assert groups.usable(EngineConfig(), 25, Scheduler) is groups
    assert not caplog.records
    single = groups.usable(EngineConfig(**own), *arguments)
    assert (single.windows, single.layers) == ((None,), ((0, 1, 2),))
    assert [reason in each.message for each in caplog.records] == [True] * bool(reason)


@pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels], ids=["m4", "m5"])
def test_a_scheduler_of_ones_own_plans_over_groups(package, tmp_path):
    own = tmp_path / "oldest_is_victim.py"
    own.write_text(
        "from m4_prefix_chunked.scheduler import Scheduler as M4\n"
        "class Scheduler(M4):\n"
        "    is_own = True\n"
        "    def by_seniority(self):\n"
        "        return super().by_seniority()[::-1]\n"
    )
    model = tiny_model("gemma3", sliding_window=8)
    prompts = random_prompts([12, 11, 30, 10])
    fields = {**TIGHT, "kv_cache_tokens": 60, "max_model_len": 60, "scheduler": str(own)}
    engine = make_engine(package, model, **fields)
    outputs = engine.generate(prompts, greedy(12))
    assert [each.token_ids for each in outputs] == [hf_greedy(model, each) for each in prompts]
    assert isinstance(engine.scheduler.kv, HybridKVCacheManager)
    assert engine.scheduler.is_own
    assert engine.stats()["preemptions"] > 0


def test_groups_are_not_used_where_their_padding_takes_more_than_windows_save():
    windows = [24] * 5 + [None] * 2  # groups of two: the last has one layer
    config, groups = EngineConfig(block_size=16), LayerGroups.of_windows(windows)
    assert groups.num_blocks_for(config, 80) == 4 * 5
    assert [groups.fits(config, 80, num_blocks) for num_blocks in (5, 6)] == [False, True]
    assert groups.num_whole_blocks_for(config, 80) == 5


@pytest.mark.parametrize(
    ("family", "max_model_len"), [("llama", 64), ("qwen2", 64), ("mistral", 24), ("gemma3", 24)]
)
def test_a_model_that_gives_nothing_back_has_m4s_own_scheduler(family, max_model_len):
    engine = make_engine(m4_prefix_chunked, tiny_model(family), max_model_len=max_model_len)
    assert type(engine.scheduler) is m4_prefix_chunked.scheduler.Scheduler


# --- tokens -------------------------------------------------------------------------------------

TIGHT = {"block_size": 4, "max_num_batched_tokens": 12}
WIDE = {"block_size": 16, "max_num_batched_tokens": 40, "kv_cache_tokens": 512}
SWAP = {**TIGHT, "preemption": "swap", "swap_space_tokens": 60, "enable_prefix_caching": False}


@pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels], ids=["m4", "m5"])
@pytest.mark.parametrize(
    ("family", "window", "few_tokens"),
    [("gemma3", 8, 104), ("gpt-oss", 11, 104), ("mistral", 9, 44)],
)
@pytest.mark.parametrize("fields", [TIGHT, WIDE, SWAP], ids=["tight", "wide", "swap"])
def test_tokens_are_those_of_huggingface(package, family, window, few_tokens, fields):
    model = tiny_model(family, sliding_window=window)
    prompts = random_prompts([12, 11, 12, 10, 3, 12, 11, 12, 12, 61, 17, 80])
    prompts.append([*prompts[9][:50], 7, 7])  # diverges where another prompt's window was
    expected = [hf_greedy(model, each) for each in prompts]
    fields = {"kv_cache_tokens": few_tokens, **fields}
    engine = make_engine(package, model, max_model_len=100, max_num_seqs=9, **fields)
    assert isinstance(engine.scheduler.kv, HybridKVCacheManager)
    for _ in range(2):  # the second time with what the prefix cache has kept
        outputs = engine.generate(prompts, greedy(12))
        assert [each.token_ids for each in outputs] == expected
    saved = engine.stats()["prefix_cache"]["saved_tokens"]
    assert engine.stats()["preemptions"] > 0 if fields["block_size"] == 4 else saved > 200


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("ministral", "fwww"), ("olmo3", "wfwf"), ("exaone4", "wwwf"), ("cohere2", "wfwf")],
)
def test_further_families_with_windows_have_groups_and_the_same_tokens(family, kinds):
    names = {"w": "sliding_attention", "f": "full_attention"}
    model = build_small_model(family, layer_types=[names[kind] for kind in kinds]).double()
    prompts = random_prompts([3, 21, 40])
    prompts.append([*prompts[2][:30], 7, 7])
    expected = [hf_generate(model, each, 8, eos_token_id=VOCAB_SIZE) for each in prompts]
    engine = make_engine(
        m4_prefix_chunked, model, max_model_len=64, block_size=4, max_num_batched_tokens=16
    )
    assert isinstance(engine.scheduler.kv, HybridKVCacheManager)
    for _ in range(2):
        outputs = engine.generate(prompts, greedy(8))
        assert [each.token_ids for each in outputs] == expected
    assert engine.stats()["prefix_cache"]["saved_tokens"] > 80


@pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels], ids=["m4", "m5"])
@pytest.mark.parametrize("family", ["phi3", "starcoder2", "ministral3", "qwen2"])
def test_families_whose_layers_all_have_a_window_hold_that_window(package, family):
    overrides = {}
    if family == "qwen2":
        overrides = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}
    model = build_small_model(family, sliding_window=8, **overrides).double()
    prompts = random_prompts([3, 21, 90])
    prompts.append([*prompts[2][:40], 7, 7])
    expected = [hf_generate(model, each, 8, eos_token_id=VOCAB_SIZE) for each in prompts]
    engine = make_engine(
        package, model, max_model_len=100, block_size=4, max_num_batched_tokens=16,
        kv_cache_tokens=64,
    )  # fmt: skip
    assert isinstance(engine.scheduler.kv, HybridKVCacheManager)
    for _ in range(2):
        outputs = engine.generate(prompts, greedy(8))
        assert [each.token_ids for each in outputs] == expected


@pytest.mark.parametrize(("family", "window"), [("gemma3", 8), ("mistral", 12)])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_m5_gives_the_same_tokens_with_drafts_that_are_rejected(family, window, async_scheduling):
    model = tiny_model(family, sliding_window=window)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6, 7, 5] * 4, *random_prompts([30])]
    expected = [hf_generate(model, each, 24, eos_token_id=VOCAB_SIZE) for each in prompts]
    engine = make_engine(
        m5_kernels, model, max_model_len=100, block_size=4, kv_cache_tokens=200,
        speculation="ngram", async_scheduling=async_scheduling,
    )  # fmt: skip
    assert isinstance(engine.scheduler.kv, HybridKVCacheManager)
    outputs = engine.generate(prompts, greedy(24))
    assert [each.token_ids for each in outputs] == expected
    stats = engine.stats()
    assert stats["spec_decode_num_draft_tokens"] > stats["spec_decode_num_accepted_tokens"]


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "window"), [("gemma3", 8), ("gpt-oss", 11), ("mistral", 9)])
@pytest.mark.parametrize("speculation", [None, "ngram"])
@pytest.mark.parametrize("fields", [{"kv_cache_tokens": 400}, SWAP], ids=["wide", "swap"])
def test_on_a_gpu_graphs_and_kernels_read_the_tables_of_each_group(
    family, window, speculation, fields
):
    model = build_tiny_model(family, sliding_window=window).float().cuda()
    prompts = random_prompts([12, 11, 12, 10, 3, 61, 17, 80])
    expected = [hf_generate(model, each, 12, eos_token_id=VOCAB_SIZE) for each in prompts]
    engine = make_engine(
        m5_kernels, model, max_model_len=100, speculation=speculation,
        **{"block_size": 4, "kv_cache_tokens": 104, "max_num_batched_tokens": 24, **fields},
    )  # fmt: skip
    assert isinstance(engine.scheduler.kv, HybridKVCacheManager)
    for _ in range(2):
        outputs = engine.generate(prompts, greedy(12))
        assert [each.token_ids for each in outputs] == expected


# --- how long a request may be -------------------------------------------------------------------


@pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels], ids=["m4", "m5"])
@pytest.mark.parametrize(
    ("family", "speculation", "longest"),
    [
        # Of 30 blocks of one layer, two windows take five each: 7 tokens before a chunk of 8.
        ("gemma3", None, 4 * (30 - 2 * 5)),
        ("gemma3", "ngram", 4 * (30 - 2 * 6)),  # and three draft tokens
        ("mistral", None, 128),  # as long as its positions
    ],
)
def test_the_longest_request_that_memory_holds_is_served(package, family, speculation, longest):
    model = tiny_model(family, sliding_window=8, max_position_embeddings=128)
    fields = {"block_size": 4, "max_num_batched_tokens": 8, "kv_cache_tokens": 40}
    fields |= {"speculation": speculation}
    engine = make_engine(package, model, **fields)
    assert engine.max_model_len == longest
    (prompt,) = random_prompts([longest - 12])
    (output,) = engine.generate([prompt], greedy(99))
    assert output.token_ids == hf_greedy(model, prompt)
    assert len(output.prompt_token_ids + output.token_ids) == longest
    assert engine.stats()["preemptions"] == 0
    with pytest.raises(ValueError, match=f"max_model_len={longest}"):
        engine.add_request([5] * longest, greedy(1))
    assert make_engine(package, model, max_model_len=longest, **fields).max_model_len == longest
    with pytest.raises(ValueError, match=f"{longest + 1}"):
        make_engine(package, model, max_model_len=longest + 1, **fields)


@pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels], ids=["m4", "m5"])
def test_memory_that_is_not_configured_is_what_all_requests_take_in_groups(package):
    model = tiny_model("gemma3", sliding_window=8)
    fields = {"max_model_len": 100, "max_num_seqs": 5, **TIGHT}
    engine = make_engine(package, model, kv_cache_tokens=None, **fields)
    config, groups = engine.config, LayerGroups.of_config(model.config)
    num_whole_blocks = 5 * groups.num_whole_blocks_for(config, 100)
    assert engine.stats()["kv"]["total"] == groups.num_blocks(num_whole_blocks)
    assert num_whole_blocks < 5 * config.num_blocks_for(100)


@pytest.mark.parametrize("package", [m4_prefix_chunked, m5_kernels], ids=["m4", "m5"])
@pytest.mark.parametrize(("family", "num_layers"), [("gemma3", 1), ("mistral", 2), ("llama", None)])
def test_blocks_times_bytes_is_the_memory_that_was_configured(package, family, num_layers):
    model = tiny_model(family)
    engine = make_engine(package, model, max_model_len=40, block_size=4, kv_cache_tokens=40)
    kv = engine.stats()["kv"]
    assert kv.get("num_layers") == num_layers
    assert kv["total"] * 4 * kv["bytes_per_token"] == 40 * KVShape.of(model).bytes_per_token


# --- when a block goes back ---------------------------------------------------------------------


@BOTH
def test_a_block_goes_back_in_the_step_whose_token_is_the_first_not_to_see_it(windows):
    life = hybrid_life(windows=windows)
    life.add(of_length("a", 5, max_tokens=14))
    gone = {}
    while life.scheduler.has_unfinished_requests():
        (row,) = life.plan().rows
        for index, block in enumerate(row.group_blocks[-1]):
            if block == NULL_BLOCK:
                gone.setdefault(index, row.start)
        assert all(NULL_BLOCK not in table for table in row.group_blocks[:-1])
    # Token t sees tokens t - 5 .. t: token 9 is the first that does not see 0..3.
    assert gone == {0: 9, 1: 13, 2: 17}


@BOTH
def test_a_prompt_holds_its_window_and_a_chunk_and_never_waits_for_blocks_under_way(windows):
    life = hybrid_life(num_blocks=12 * windows.count(None) + 5, windows=windows)
    life.add(of_length("a", 40, max_tokens=4))
    most = 0
    while life.scheduler.has_unfinished_requests():
        life.plan()
        if "a" in life.kv.blocks.block_tables:
            *full, windowed = num_held(life, "a")
            most = max(most, windowed)
            assert all(num >= 10 for num in full)
    assert most <= 5  # ceil((6 - 1 + 8 + 1) / 4) + 1


def begins_in_a_window(num_blocks, chunk):
    """Return a life in which `a` has computed its prompt, with `a`, and with a `b` that begins as
    `a` does and goes on for longer than the window."""
    life = hybrid_life(
        num_blocks, max_model_len=40,
        max_num_batched_tokens=2 * chunk + 3, long_prefill_token_threshold=chunk,
    )  # fmt: skip
    a = request_of("a", prompt("ABCD", 1), max_tokens=20)
    life.add(a)
    while a.num_uncomputed_tokens > 1:
        life.plan()
    return life, a, request_of("b", prompt("ABCD", 20), max_tokens=1)


@pytest.mark.parametrize("num_blocks", range(16, 34))
@pytest.mark.parametrize("chunk", [3, 6])
def test_a_shared_block_that_goes_back_leaves_one_free_for_the_prompt_under_way(num_blocks, chunk):
    # `b` leaves the window of `a` while `c` takes what is free.
    life, a, b = begins_in_a_window(num_blocks, chunk)
    life.run(b, *(of_length(f"c{n}", n, max_tokens=1) for n in (9, 5, 3, 2)))
    assert b.num_cached_tokens == 16
    assert_tokens([a, b])


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(15, False), (16, True)])
def test_a_request_is_admitted_if_a_block_is_left_for_each_that_its_window_shares(
    num_blocks, is_admitted
):
    life, a, b = begins_in_a_window(num_blocks, chunk=3)
    life.add(b)
    assert life.plan().admitted == ([b] if is_admitted else [])
    life.run()
    assert_tokens([a, b])


# --- the prefix cache ---------------------------------------------------------------------------


@BOTH
def test_a_hit_needs_the_window_before_it_and_nothing_earlier(windows):
    life = hybrid_life(windows=windows)
    life.run(request_of("a", prompt("ABCDEF", 1)))
    b = request_of("b", prompt("ABCDEF", 2), max_tokens=2)
    life.add(b)
    life.plan()
    assert b.num_cached_tokens == 24
    assert [block == NULL_BLOCK for block in tables(life, "b")[-1][:6]] == [True] * 4 + [False] * 2


@BOTH
@pytest.mark.parametrize(("evicted", "num_cached"), [(5, 20), (4, 16), (3, 24)])
def test_a_hit_is_shorter_if_a_block_of_its_window_was_evicted(windows, evicted, num_cached):
    life = hybrid_life(windows=windows)
    a = request_of("a", prompt("ABCDEF", 1))
    life.run(a)
    cache = life.cache
    b = request_of("b", prompt("ABCDEF", 2))
    cache.pool.forget(cache.pool.block_of[cache._name(b, len(windows) - 1, evicted)])
    life.run(b)
    assert b.num_cached_tokens == num_cached
    assert_tokens([b])


@pytest.mark.parametrize(("window", "num_blocks"), [(5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_window_that_ends_inside_a_block_needs_that_block(window, num_blocks):
    life = hybrid_life(windows=(None, window))
    life.run(request_of("a", prompt("ABCDEF", 1)))
    b = request_of("b", prompt("ABCDEF", 2))
    life.add(b)
    assert life.kv.find(b) == 24
    hit = life.cache.find(b)
    assert sum(block != NULL_BLOCK for block in tables_of(hit.blocks)[1]) == num_blocks
    # All its tokens are cached: the last is computed again, and sees one token further back.
    c = request_of("c", prompt("ABCDEF"))
    hit = life.cache.find(c)
    assert hit.num_tokens == 23
    assert sum(block != NULL_BLOCK for block in tables_of(hit.blocks)[1]) == -(-window // SIZE)


def test_a_prompt_that_is_not_cached_is_looked_up_once_a_block(monkeypatch):
    life = hybrid_life(num_blocks=400, windows=(100,), max_model_len=1000)
    life.run(of_length("a", 900))
    find, names = life.cache._block, []
    monkeypatch.setattr(life.cache, "_block", lambda *name: names.append(name) or find(*name))
    assert life.cache.find(of_length("b", 900)).num_tokens == 0
    assert len(names) == 900 // SIZE


def test_a_block_that_a_request_has_just_filled_is_shared():
    life = hybrid_life()
    a = of_length("a", 7, max_tokens=9)
    life.add(a)
    life.plan()
    assert len(a.token_ids) == 8
    b = request_of("b", [*a.token_ids, 7, 7], max_tokens=9)
    life.run(b)  # it comes in the step whose row of `a` fills the block, which has invariants
    assert b.num_cached_tokens == 8
    assert_tokens([a, b])


def test_blocks_that_went_back_before_their_request_went_wrong_are_not_found_again(monkeypatch):
    """The first chunks show nothing. By the last one the window has left their blocks."""
    model = tiny_model("gemma3", sliding_window=8)
    engine = make_engine(
        m4_prefix_chunked, model, max_model_len=64, block_size=4, max_num_batched_tokens=16
    )
    assert isinstance(engine.scheduler.kv, HybridKVCacheManager)
    (prompt,) = random_prompts([40])
    values = engine.model.model.layers[0].self_attn.v_proj
    forward = values.forward
    monkeypatch.setattr(values, "forward", lambda hidden: forward(hidden) * float("nan"))
    assert engine.generate(prompt, greedy(4))[0].finish_reason == "error"
    monkeypatch.undo()
    for each in (prompt, [*prompt[:16], 7, 7]):
        (output,) = engine.generate(each, greedy(4))
        assert output.token_ids == hf_generate(model, each, 4, eos_token_id=VOCAB_SIZE)
    assert output.num_cached_tokens == 16


def test_requests_that_diverge_inside_the_window_share_what_they_can_and_nothing_else():
    life = hybrid_life(num_blocks=60, windows=(None, 10, 7))
    requests = [
        request_of("a", prompt("ABC", 3, own="a"), max_tokens=9),
        request_of("b", prompt("ABC", 2, own="b"), max_tokens=9),
        request_of("c", prompt("ABC"), max_tokens=9),
    ]
    life.run(*requests)
    assert [each.num_cached_tokens for each in requests] == [0, 12, 11]


def test_a_block_that_this_step_fills_is_not_copied_before_it_is_filled():
    life = hybrid_life(max_num_batched_tokens=32)
    requests = [request_of(name, prompt("ABC"), max_tokens=5) for name in "ab"]
    life.run(*requests)
    assert requests[1].num_cached_tokens == 8


def test_completions_share_and_copy_in_every_group():
    life = hybrid_life(num_blocks=60)
    request = request_of("a", prompt("ABCD", 2), max_tokens=9, n=3)
    life.run(request)
    assert life.kv.blocks.num_copies == 4  # two forks, two groups


# --- swapping -----------------------------------------------------------------------------------


def swapped(num_blocks, windows):
    """Return a life in which `b` has just been swapped out, with `b` and the step's plan."""
    life = hybrid_life(num_blocks, windows, preemption="swap", enable_prefix_caching=False)
    a, b = (of_length(name, 22, max_tokens=12) for name in "ab")
    life.add(a, b)
    return life, (a, b), life.run_to_preemption()


SEVERAL = pytest.mark.parametrize(
    ("num_blocks", "windows"), [(22, (None, 6)), (29, (None, 6, 9))], ids=str
)


@SEVERAL
def test_swapping_moves_what_a_window_still_sees_and_nothing_earlier(num_blocks, windows):
    life, (a, b), plan = swapped(num_blocks, windows)
    assert [each.request for each in plan.preempted] == [b]
    written = -(-b.num_computed_tokens // SIZE)
    firsts = [(b.num_computed_tokens - (window or 99) + 1) // SIZE for window in windows]
    assert max(firsts) > 1
    assert len(plan.swap_outs) == sum(written - max(0, first) for first in firsts)
    life.run()
    assert_tokens([a, b])
    assert not life.kv.group_preempter.places
    assert life.kv.preempter.host.pool.num_used == 0


@SEVERAL
@pytest.mark.parametrize("ends", ["abort", "reset"])
def test_a_swapped_request_that_ends_leaves_nothing_in_host_memory(num_blocks, windows, ends):
    life, (a, b), _ = swapped(num_blocks, windows)
    if ends == "abort":
        life.abort(b)
        life.run()
        assert_tokens([a])
    else:
        life.kv.reset()
    assert not life.kv.group_preempter.places
    assert life.kv.preempter.host.pool.num_used == 0


@pytest.mark.parametrize(("space", "num_host_blocks"), [(None, 30), (0, 0), (40, 20)])
def test_host_memory_is_counted_in_blocks_of_a_group(space, num_host_blocks):
    life = hybrid_life(30, preemption="swap", swap_space_tokens=space)
    assert life.scheduler.num_host_blocks == num_host_blocks
    assert life.kv.preempter.host.pool.num_blocks == num_host_blocks


# --- rules of a plan ----------------------------------------------------------------------------


def test_a_row_with_another_table_in_a_further_group_is_refused():
    life = hybrid_life()
    request = of_length("a", 5)
    life.add(request)
    plan = life.scheduler.schedule()
    arguments = life.scheduler, 1, 0, {"a": request}
    check_plan(plan, *arguments)
    first, second = plan.rows[0].group_blocks
    plan.rows[0].blocks = type(first)(first, [second[::-1]])
    with pytest.raises(PlanError, match="by group"):
        check_plan(plan, *arguments)
