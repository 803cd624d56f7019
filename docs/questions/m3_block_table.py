"""How does a block table grow, and in which slot is token 9 of a request?"""

from m1_single import SamplingParams
from m3_paged import LLMEngine

engine = LLMEngine(
    "tiny-llama", device="cpu", max_model_len=32, kv_cache_tokens=40, block_size=4, max_num_seqs=2
)
for prompt_length in (6, 3):
    engine.add_request([5] * prompt_length, SamplingParams(max_tokens=8, ignore_eos=True))

print("step   r0: tokens  block table       r1: tokens  block table")
for step in range(7):
    engine.step()
    cells = []
    for request in engine.scheduler.running:
        table = engine.scheduler.kv.blocks.block_tables[request.request_id]
        cells.append(f"{request.num_computed_tokens:10}  {table!s:17}")
    print(f"{step:4}   {' '.join(cells)}".rstrip())

size = engine.config.block_size
table = engine.scheduler.kv.blocks.block_tables["r0"]
block, offset = table[9 // size], 9 % size
slot = block * size + offset
print(f"\ntoken 9 of r0: entry 9 // {size} = {9 // size} of the table is block {block},")
print(f"offset 9 % {size} = {offset}, so its slot is {block} * {size} + {offset} = {slot}")
