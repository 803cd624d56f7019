"""A scheduler that plans what vLLM's plans, made of M4's objects. Each difference is a rule.

    M4                   here
    Scheduler            Scheduler           one loop over running requests, one over waiting ones
    KVCacheManager       VLLMCacheManager    blocks chunk by chunk
    PrefixCache          VLLMPrefixCache     whole blocks only
    CachingBlockPool     CopiesPool          all blocks of a content can be found

Read it beside `m4_prefix_chunked/scheduler.py`. Without rules it plans what M4 plans: a test holds
both to that. `rules.py` says what each rule means.
"""

from __future__ import annotations

from collections.abc import Callable

from m3_paged.block_manager import BlockManager
from m3_paged.preemption import Preempter
from m4_prefix_chunked.caching_pool import CachingBlockPool
from m4_prefix_chunked.config import EngineConfig
from m4_prefix_chunked.kv_cache_manager import KVCacheManager
from m4_prefix_chunked.prefix_cache import PrefixCache, PrefixHit
from m4_prefix_chunked.speculation import GuessingRow, Proposer, Speculation
from milestone_llm.core.kv import KVEvent
from milestone_llm.core.outputs import EngineCoreOutput, SampledToken
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler

Rules = frozenset[str]


class Scheduler(BaseScheduler):
    """Plans running requests, then waiting ones, within a token budget.

    Args:
        rules: names of `rules.RULES`.
        proposer: makes draft tokens, where the configuration asks for speculation.
    """

    kv: VLLMCacheManager

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        num_blocks: int,
        proposer: Proposer | None = None,
        *,
        rules: Rules = frozenset(),
    ) -> None:
        super().__init__(VLLMCacheManager(config, num_blocks, rules), max_model_len, config.policy)
        self.config = config
        self.rules = rules
        self.is_alone = False
        """Whether there is one request only, as counted before the step."""
        self.speculation: Speculation | None = None
        if config.speculation:
            self.speculation = Speculation(config, self.kv, proposer)
        self.in_prompt: set[Request] = set()
        """Running requests whose last row did not reach the last known token."""
        self.drafts: dict[Request, list[int]] = {}
        """Draft tokens for the next step, proposed when the step before was settled."""

    def validate(self, request: Request) -> None:
        """Refuse a prompt that no chunks can carry."""
        if not self.config.enable_chunked_prefill:
            self.config.check_prompt_fits_step(request.num_prompt_tokens)

    def schedule(self) -> StepPlan:
        """Plan the next step."""
        plan, budget = StepPlan(), self.config.max_num_batched_tokens
        self.kv.begin_step()
        self.is_alone = len(self.running) + len(self.waiting) <= 1
        if "one_loop" in self.rules:
            budget = self._serve_running(plan, budget, lambda request: True)
        else:
            budget = self._serve_running(plan, budget, lambda one: one.num_uncomputed_tokens == 1)
            budget = self._serve_running(plan, budget, lambda one: one.num_uncomputed_tokens > 1)
        self._admit_waiting(plan, budget)
        if self.speculation and "drafts_in_rows" not in self.rules:
            self.speculation.extend(plan, self.config.max_num_batched_tokens - plan.num_tokens)
        served = {row.request for row in plan.rows}
        self.in_prompt -= served
        self.in_prompt |= {row.request for row in plan.rows if not row.samples}
        return plan

    def _serve_running(self, plan: StepPlan, budget: int, is_due: Callable[[Request], bool]) -> int:
        """Add a row for each running request, as far as the budget goes. Returns the budget
        left."""
        by_priority = self.by_seniority()
        order = list(self.running) if "admission_order" in self.rules else by_priority
        for request in order:
            if not budget:
                break
            if request.status is not RequestStatus.RUNNING or not is_due(request):
                continue
            drafts = self.drafts.pop(request, [])
            num_new = self._cut(request.num_uncomputed_tokens + len(drafts), budget)
            num_new = min(num_new, self.max_model_len - request.num_computed_tokens - 1)
            if num_new <= 0:
                continue
            is_there, withdrawn = self._make_room(request, plan, num_new)
            budget += withdrawn
            if is_there:
                self._add_row(request, plan, num_new, drafts=drafts)
                budget -= num_new
            elif "admission_order" in self.rules and "not_itself_only" not in self.rules:
                break
        return budget

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit requests from the head of the queue, as far as seats, budget and blocks go."""
        has_rows = bool(plan.rows)
        has_prompts = any(row.request in self.in_prompt for row in plan.rows)
        while self.waiting and not plan.preempted:
            request = self.waiting.peek()
            padding = [] if has_prompts else self._padding(request, has_rows)
            if reason := self.reason_to_wait(request, budget, len(padding)):
                plan.waiting_reasons[request.request_id] = reason
                break
            self.waiting.pop()
            num_cached = self.kv.find(request)
            num_new = self._cut(request.num_tokens - num_cached, budget) + len(padding)
            is_lazy = "lazy" in self.rules
            self.kv.admit(request, plan, num_cached + num_new if is_lazy else request.num_tokens)
            request.become(RequestStatus.RUNNING)
            self.running.append(request)
            (plan.resumed if request.num_preemptions else plan.admitted).append(request)
            self._add_row(request, plan, num_new, num_cached, drafts=padding)
            budget -= num_new

    def _padding(self, request: Request, has_rows: bool) -> list[int]:
        """Return draft tokens that no token equals, for a newcomer with one token to compute in a
        step of decode rows: all rows of such a step have the same length."""
        if not self.speculation or "padded" not in self.rules:
            return []
        num_cached, num_drafts = self.kv.find(request), self.config.num_speculative_tokens
        is_decode = request.num_tokens - num_cached == 1 and (has_rows or num_cached > 0)
        has_place = num_cached + 1 + num_drafts + 1 <= self.max_model_len
        return [-1] * num_drafts if is_decode and has_place else []

    def by_seniority(self) -> list[Request]:
        """Return running requests by admission or (priority, arrival). The last is preempted
        first."""
        is_by_priority = self.config.policy == "priority"
        return sorted(self.running, key=self.waiting.key) if is_by_priority else list(self.running)

    def reason_to_wait(self, request: Request, budget: int, num_padding: int) -> str | None:
        """Return why a request cannot join a step with `budget` tokens left."""
        if len(self.running) >= self.config.max_num_seqs:
            return f"max_num_seqs={self.config.max_num_seqs}, running: {len(self.running)}"
        num_new_tokens = request.num_tokens - self.kv.find(request) + num_padding
        is_cut = self.config.enable_chunked_prefill and not num_padding
        if budget < (1 if is_cut else num_new_tokens):
            return f"tokens needed: {num_new_tokens}, left in this step: {budget}"
        if not self.kv.has_room(request, num_padding):
            return f"no KV memory: {self.kv.describe(request)}"
        return None

    def _cut(self, num_new_tokens: int, budget: int) -> int:
        """Return how many of these tokens a row may have."""
        if num_new_tokens > 1 and self.config.enable_chunked_prefill:
            longest = self.config.long_prefill_token_threshold
            if longest and not (self.is_alone and "lone" in self.rules):
                num_new_tokens = min(num_new_tokens, longest)
        return min(num_new_tokens, budget)

    def _make_room(self, request: Request, plan: StepPlan, num_new: int) -> tuple[bool, int]:
        """Get blocks for a running request's next tokens.

        Returns:
            Whether they are there: not if the request itself was preempted. And how many tokens
            of the budget come back from rows of this step that had to go.
        """
        num_withdrawn = 0
        while not self.kv.grow(request, plan, request.num_computed_tokens + num_new):
            victim = self.by_seniority()[-1]
            for row in [row for row in plan.rows if row.request is victim]:
                plan.rows.remove(row)
                num_withdrawn += row.num_new_tokens
            self.kv.preempt(victim, plan, f"no free block for {request.request_id}")
            self.drafts.pop(victim, None)
            self.running.remove(victim)
            self.waiting.add(victim)
            if victim is request:
                return False, num_withdrawn
        return True, num_withdrawn

    def _add_row(
        self,
        request: Request,
        plan: StepPlan,
        num_new_tokens: int,
        num_cached: int = 0,
        drafts: list[int] | None = None,
    ) -> None:
        """Add a row. Draft tokens are its last tokens; those for which it has no room are
        dropped."""
        start = request.num_computed_tokens
        num_drafts = max(0, start + num_new_tokens - request.num_tokens)
        row = ScheduledRequest(
            request,
            start,
            num_new_tokens - num_drafts,
            blocks=self.kv.blocks_of(request),
            num_cached_tokens=num_cached,
        )
        end = row.end
        if drafts and num_drafts:
            row = GuessingRow.of(row, drafts[:num_drafts])
        plan.rows.append(row)
        self.kv.cache(request, end)

    def update(
        self, plan: StepPlan, sampled: dict[str, list[SampledToken]]
    ) -> list[EngineCoreOutput]:
        """Take in the results of a step, then propose draft tokens for the next one."""
        if not plan.is_launched:
            self.mark_launched(plan)
        if self.speculation:
            self.speculation.settle(plan, sampled)
        outputs = super().update(plan, sampled)
        for row in plan.rows:
            request = row.request
            if row.samples and request.status is RequestStatus.RUNNING:
                self.kv.cache_settled(request)
                if self.speculation and "drafts_in_rows" in self.rules:
                    most = self.config.num_speculative_tokens
                    self.drafts[request] = self.speculation.proposer.propose(request, most)
        return outputs


class VLLMCacheManager(KVCacheManager):
    """M4's KV manager with other parts, and with blocks for a chunk at a time."""

    def __init__(self, config: EngineConfig, num_blocks: int, rules: Rules) -> None:
        self.rules = rules
        self.events: list[KVEvent] = []
        copies = CopiesPool if "copies_findable" in rules else CachingBlockPool
        blocks = OrderedBlocks if "empty_order" in rules else BlockManager
        self.pool = copies(num_blocks, self.events)
        self.blocks = blocks(self.pool, config.block_size, self.events)
        self.prefix_cache: VLLMPrefixCache = VLLMPrefixCache(
            self.blocks, self.pool, config.enable_prefix_caching, rules
        )
        self.preempter = Preempter(self.blocks, config.num_host_blocks(num_blocks))
        self._found: tuple[Request, PrefixHit] | None = None

    def has_room(self, request: Request, num_padding: int) -> bool:
        """Whether there is room for all known tokens, and for so many after them."""
        return self.prefix_cache.can_allocate(request, self._hit(request), num_padding)

    def admit(self, request: Request, plan: StepPlan, end: int) -> None:
        """Give a request blocks for its first `end` tokens; the cached ones count as computed."""
        hit, self._found = self._hit(request), None
        self.blocks.adopt(request.request_id, hit.blocks)
        self.prefix_cache.num_findable[request.request_id] = len(hit.blocks)
        plan.copies += self.blocks.append(request.request_id, hit.num_tokens, end)
        request.num_computed_tokens = hit.num_tokens

    def grow(self, request: Request, plan: StepPlan, end: int) -> bool:
        """Make room for a running request's tokens up to `end - 1`. Returns False, with nothing
        done, if too few blocks are free."""
        name, start = request.request_id, request.num_computed_tokens
        if not self.blocks.can_append(name, start, end):
            return False
        plan.copies += self.blocks.append(name, start, end)
        self._found = None
        return True

    def cache_settled(self, request: Request) -> None:
        """Make findable the blocks that settled steps have filled. The token sampled last is not
        among their tokens, even if a step ahead, or one with draft tokens, has computed it."""
        if "settled_findable" in self.rules:
            self.cache(request, min(request.num_computed_tokens, len(request.token_ids) - 1))

    def free(self, request: Request) -> None:
        """Take back a request's blocks. One that is aborted makes nothing findable any more."""
        if "settled_findable" not in self.rules:
            super().free(request)
            return
        if request.request_id in self.blocks.block_tables:
            if request.finish_reason in ("stop", "length"):
                self.cache_settled(request)
            self.blocks.free(request.request_id)
        self.prefix_cache.release(request)

    def preempt(self, victim: Request, plan: StepPlan, reason: str) -> None:
        """Take a running request's blocks. What a withdrawn row would have filled stays
        findable."""
        if "settled_findable" not in self.rules:
            super().preempt(victim, plan, reason)
            return
        self.preempter.preempt(victim, plan, reason)
        self.prefix_cache.release(victim)


class VLLMPrefixCache(PrefixCache):
    """A prefix cache from which whole blocks come, or none."""

    def __init__(
        self, kv: BlockManager, pool: CachingBlockPool, is_enabled: bool, rules: Rules
    ) -> None:
        super().__init__(kv, pool, is_enabled)
        self.rules = rules

    def find(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix. A row computes at least the last token."""
        hit, size = super().find(request), self.kv.block_size
        if hit.num_tokens % size and "whole_blocks" in self.rules:
            return PrefixHit(hit.blocks[:-1], hit.num_tokens // size * size)
        return hit

    def can_allocate(self, request: Request, hit: PrefixHit, num_padding: int = 0) -> bool:
        """Whether a table for all known tokens, and for so many after them, fits."""
        num_new = self.kv.num_blocks_for(request.num_tokens + num_padding) - len(hit.blocks)
        if hit.num_tokens < len(hit.blocks) * self.kv.block_size:  # writes into the last block
            num_new += self.pool.ref_counts[hit.blocks[-1]] > 0
        num_revived = sum(self.pool.ref_counts[block] == 0 for block in hit.blocks)
        return num_new + num_revived <= self.pool.num_free

    def _is_asked(self, request: Request) -> bool:
        needs_all = request.sampling_params.prompt_logprobs is not None
        if needs_all and "logprobs_compute" in self.rules:
            return False
        return super()._is_asked(request)


class OrderedBlocks(BlockManager):
    """Block tables whose empty blocks are given out next in the order in which they were freed."""

    def free(self, request_id: str) -> None:
        """Drop a request's table, last block first. Its last empty block is given out first."""
        table = self.block_tables[request_id]
        super().free(request_id)
        assert isinstance(self.pool, CachingBlockPool)
        for block in table:
            if not self.pool.ref_counts[block] and block not in self.pool.hash_of:
                self.pool.free_blocks.move_to_end(block, last=False)


class CopiesPool(CachingBlockPool):
    """A pool in which several blocks may have one content. If one is evicted, the next is found."""

    def reset(self) -> None:
        """Make all blocks free, lowest first, and forget their content."""
        super().reset()
        self.copies: dict[bytes, dict[int, None]] = {}
        """The blocks of each content, the first to be found first."""

    def remember(self, block: int, block_hash: bytes) -> bool:
        """Make a used block findable. Returns whether it was not findable before."""
        if block in self.hash_of:
            return False
        self.hash_of[block] = block_hash
        self.copies.setdefault(block_hash, {})[block] = None
        self.block_of.setdefault(block_hash, block)
        return True

    def forget(self, block: int) -> None:
        """Make a block unfindable. A copy takes its place."""
        self.num_cached_free -= self.ref_counts[block] == 0
        block_hash = self.hash_of.pop(block)
        copies = self.copies[block_hash]
        del copies[block]
        if copies:
            self.block_of[block_hash] = next(iter(copies))
        else:
            del self.copies[block_hash], self.block_of[block_hash]

    def check_invariants(self) -> None:
        """Assert that every content is found in its first copy, and free ones are counted."""
        assert {h: next(iter(blocks)) for h, blocks in self.copies.items()} == self.block_of
        assert self.num_cached_free == sum(block in self.hash_of for block in self.free_blocks)
