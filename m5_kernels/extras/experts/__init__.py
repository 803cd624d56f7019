"""Experts: a layer's MLP is many small ones, and each token meets a few of them.

Read in this order:

    moe_mlp       the weights of a layer, and what it launches
    routing       which experts a token meets
    sorting       tokens in the order of their experts, in tiles
    grouped       products of all experts in one launch
    combine_norm  the sum of a token's experts, with the add and norm that follow
    swiglu        what gpt-oss's experts compute of gate and up
    cpu_experts   what torch computes on a CPU
    tiles         how much a program computes at once
    config        what a family's experts are like
    expert_load   how many experts a step met, for its record
"""
