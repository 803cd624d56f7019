"""M4's scheduler beside vLLM's own, step by step: `python -m m4_prefix_chunked.tools.vllm.compare`

traffic      requests, limits and aborts: random, or written down
run_m4       M4's side, one record a step
run_vllm     vLLM's side, the same records; the one file that imports vLLM
like_vllm    M4 with rules of vLLM, each a switch
compare      the program: both sides, the first step that differs, the rule that explains it
fetch        the Python files of a vLLM wheel, without its compiled parts
"""
