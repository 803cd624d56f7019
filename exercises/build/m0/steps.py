"""The steps of M0's course: what each part of the model must compute, and which mistake it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from docs.questions import m0_transformer as ours
from exercises.build.check import Parts, Wrong, step
from exercises.build.guarded import always, compare_numbers, like, random_tensor
from exercises.build.skeleton import File, Todo

MILESTONE, FILE = "docs.questions", "m0_transformer"
TITLE = "the model: a Llama in PyTorch (2 to 3 hours)"
DONE = """All of it. Your file is a program, too: it compares itself with Hugging Face's modules.

  python -m exercises.build.m0.m0_transformer

Ours is docs/questions/m0_transformer.py."""

FILES = [
    File(
        "docs/questions/m0_transformer.py",
        {
            "rms_norm": "step 1: the mean of the squares of each row (keepdim=True), plus eps; "
            "torch.rsqrt of that scales the row.",
            "rotate": Todo(
                "step 2: angles [num_tokens, half]: position * theta ** (-i / half). Pair i of a "
                "head is x[..., i] and x[..., i + half]; turn it by its angle.",
                first=1,
            ),
            "attend": "step 3: scores query @ key of its group, divided by the root of head_dim; "
            "-inf for later tokens; softmax; the sum of values. Query heads 0 to group - 1 share "
            "KV head 0.",
            "mlp": "step 4: gate and up, then down: three products with w[name].T.",
            "attention": Todo(
                "step 5: query, key, value by `heads`; rotate from the position after the cached "
                "tokens; cached keys and values before the new ones; attend; o_proj.",
                first=1,
            ),
            "sample": "step 6: at temperature 0 the argmax. Else softmax, sorted; cumulative sums "
            "tell how many tokens count, and where uniform * their sum falls.",
        },
        """You write what raises NotImplementedError, from top to bottom:

    python -m exercises.build m0         what to write next, and what is wrong with it
    python -m exercises.build m0 3       step 3 alone

`layer` and `Model` are there: they put your parts together.""",
    )
]


Mistakes = dict[str, torch.Tensor]
"""Words for the reader, and what the mistake makes. The first that fits is told."""


def check(parts: Parts, name: str, case: str, given: Any, mistakes: Mistakes) -> None:
    """Call a function of the reader's and compare what it returns with what ours does."""
    got = getattr(parts.module(FILE), name)(*given)
    check_tensor(f"{name}: {case}", got, getattr(ours, name)(*given), mistakes)


def check_tensor(
    case: str, got: Any, wanted: torch.Tensor, mistakes: Mistakes, otherwise: str = ""
) -> None:
    """Compare a tensor of the reader's with the right one, first its shape."""
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"{case}\nIt is a {type(got).__name__}, and should be a tensor.")
    if got.shape != wanted.shape:
        raise Wrong(f"{case}\nIts shape is {list(got.shape)}, and should be {list(wanted.shape)}.")
    causes = [(like(wrong), words) for words, wrong in mistakes.items()]
    compare_numbers(case, got, wanted, [*causes, (always, otherwise)])


@step("RMSNorm", "m0_transformer.py", needs_model=True)
def norm(parts: Parts) -> None:
    """`rms_norm` brings the numbers of each token to one size: it divides them by the root of the
    mean of their squares, and multiplies by `weight`, one number for each place."""
    weight, eps = random_tensor(8, seed=1), 1e-5
    for case, x in {
        "3 tokens of 8 numbers": random_tensor(3, 8) * torch.tensor([[1.0], [10.0], [0.1]]) + 1,
        "numbers about 0.001: eps is as large as their squares": random_tensor(2, 8) * 1e-3,
        "a token of zeros": torch.zeros(1, 8),
    }.items():
        square, mean = x.square(), x.square().mean(-1, keepdim=True)
        mistakes = {
            "The rows have one size now. Multiply them by weight.": x * torch.rsqrt(mean + eps),
            "That is LayerNorm. RMSNorm does not subtract the mean.": (
                F.layer_norm(x, [8], weight, None, eps)
            ),
            "That divides by the root of the sum of squares. It is the mean, of 8 numbers.": (
                weight * x * torch.rsqrt(square.sum(-1, keepdim=True) + eps)
            ),
            "That is one mean for all tokens. Each token has its own: mean(-1, keepdim=True).": (
                weight * x * torch.rsqrt(square.mean() + eps)
            ),
            "eps is added to the mean of squares, under the root.": weight * x / (mean**0.5 + eps),
            "eps is missing: it is added to the mean of squares, under the root. 0 / 0 is NaN.": (
                weight * x * torch.rsqrt(mean)
            ),
        }
        check(parts, "rms_norm", case, (x, weight, eps), mistakes)


def in_neighbours(x: torch.Tensor, start: int, theta: float) -> torch.Tensor:
    """RoPE with other pairs: numbers 2i and 2i + 1, as in GPT-J."""
    apart = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    return torch.stack(ours.rotate(apart, start, theta).chunk(2, -1), -1).flatten(-2)


def turned_back(x: torch.Tensor, start: int, theta: float) -> torch.Tensor:
    """RoPE by the opposite angles."""
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(x.shape[-1] // 2)
    return signs * ours.rotate(signs * x, start, theta)


@step("RoPE", "m0_transformer.py", needs_model=True)
def rope(parts: Parts) -> None:
    """`rotate` turns pairs of numbers by an angle that grows with the token's position. The first
    token of x has position `start`, and at position 0 nothing is turned. Pair 0 turns fastest."""
    theta, x = 100.0, random_tensor(2, 3, 8)
    for case, given, start in (
        ("2 heads, one token, at position 0", x[:, :1], 0),
        ("2 heads, 3 tokens from position 0 on", x, 0),
        ("2 heads, 3 tokens from position 5 on", x, 5),
    ):
        mistakes = {
            "Nothing is turned.": given,
            "That turns numbers 2i and 2i + 1. Llama's pairs are i and i + head_dim/2.": (
                in_neighbours(given, start, theta)
            ),
            "That turns the other way: first * cos - second * sin, second * cos + first * sin.": (
                turned_back(given, start, theta)
            ),
            "That begins at position 0. With a cache, the first new token has position start.": (
                ours.rotate(given, 0, theta)
            ),
            "The angles shrink half as fast as they should: the exponent is -i / (head_dim/2).": (
                ours.rotate(given, start, theta**0.5)
            ),
            "Positions count from 0: position `start` is that of the first token.": (
                ours.rotate(given, start + 1, theta)
            ),
        }
        check(parts, "rotate", case, (given, start, theta), mistakes)


def attend_wrongly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    first_hidden: int | None = None,
    is_repeated: bool = False,
    dim: int = -1,
) -> torch.Tensor:
    """Attention with one thing otherwise."""
    (_, num_new, head_dim), num_tokens = query.shape, key.shape[1]
    group = len(query) // len(key)
    if is_repeated:
        key, value = key.repeat(group, 1, 1), value.repeat(group, 1, 1)
    else:
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * (head_dim**-0.5 if scale is None else scale)
    diagonal = num_tokens - num_new + 1 if first_hidden is None else first_hidden
    is_later = torch.ones(num_new, num_tokens, dtype=torch.bool).triu(diagonal)
    return scores.masked_fill(is_later, -torch.inf).softmax(dim) @ value


@step("attention with grouped heads", "m0_transformer.py", needs_model=True)
def grouped(parts: Parts) -> None:
    """`attend` lets each new token look at the tokens up to itself. The new tokens are the last
    ones of `key` and `value`. Several query heads share one head of keys and values (GQA)."""
    for case, (num_q, num_kv, num_new, num_tokens) in {
        "a decode step, one head: 1 new token of 5": (1, 1, 1, 5),
        "a prompt: 3 tokens, 2 heads, all new": (2, 2, 3, 3),
        "3 tokens, 6 query heads, 2 KV heads": (6, 2, 3, 3),
        "the last 2 of 5 tokens are new, 4 query heads, 2 KV heads": (4, 2, 2, 5),
    }.items():
        query = random_tensor(num_q, num_new, 16)
        key, value = random_tensor(2, num_kv, num_tokens, 16, seed=1)
        given = query, key, value
        mistakes = {
            "The scores are too large: divide them by the root of head_dim.": {"scale": 1.0},
            "Divide by the root of head_dim, once.": {"scale": 1 / 16},
            "Each token sees all others. A later token's score is -inf, before softmax.": {
                "first_hidden": num_tokens
            },
            "New token i is taken for token i. It is token num_tokens - num_new + i, and may see "
            "all before it: triu(num_tokens - num_new + 1).": {"first_hidden": 1},
            "Query heads 0, 1, 2 share KV head 0, and so on: repeat_interleave(group, 0), not "
            "repeat.": {"is_repeated": True},
            "A token sees itself, too: the first that is hidden is the one after it.": {
                "first_hidden": num_tokens - num_new
            },
            "Softmax is over keys, the last dimension.": {"dim": -2},
        }
        wrong = {words: attend_wrongly(*given, **options) for words, options in mistakes.items()}
        check(parts, "attend", case, given, wrong)


def tiny_weights() -> tuple[dict[str, torch.Tensor], Any]:
    """Weights of a layer, and the config, of a tiny model: 4 query heads, 2 KV heads of 16."""
    from milestone_llm.models.tiny_models import build_tiny_model

    model = ours.Model(build_tiny_model("llama"))
    return model.layers[0], model.config


@step("SwiGLU", "m0_transformer.py", needs_model=True)
def swiglu(parts: Parts) -> None:
    """`mlp` makes two wide rows of a token's row, `gate` and `up`. silu(gate) says how much of
    each number of `up` gets through; `down` makes a row of the first width of it."""
    w, _ = tiny_weights()
    x = random_tensor(3, 64) / 8
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    mistakes = {
        "silu is missing: F.silu(gate), before it meets up.": gate * up,
        "silu belongs to gate, not to up.": gate * F.silu(up),
        "silu(gate) is gate * sigmoid(gate).": gate.sigmoid() * up,
        "That is GELU. Llama has silu.": F.gelu(gate) * up,
        "up is missing: the two are multiplied.": F.silu(gate),
        "The two are multiplied, not added.": F.silu(gate) + up,
        "silu belongs to gate alone.": F.silu(gate * up),
    }
    down = w["mlp.down_proj.weight"].T
    wrong = {words: hidden @ down for words, hidden in mistakes.items()}
    check(parts, "mlp", "3 tokens of 64 numbers", (x, w), wrong)


@step("a KV cache", "m0_transformer.py", needs_model=True)
def cached(parts: Parts) -> None:
    """`attention` puts it together. New tokens have the positions after the cached ones. Their
    keys, rotated, and values come after the cached ones; the next step gets both as `cache`."""
    w, config = tiny_weights()
    x, mine = random_tensor(5, 64) / 8, parts.module(FILE)
    whole, (keys, values) = ours.attention(x, w, None, config)
    got, cache = mine.attention(x[:3], w, None, config)
    case = "attention: 3 tokens, no cache"
    theta = config.rope_parameters["rope_theta"]
    unrotated = (x[:3] @ w["self_attn.k_proj.weight"].T).view(3, 2, 16).transpose(0, 1)
    mistakes = {
        "These keys are not rotated. Rotate them once, before they are kept.": unrotated,
        "These keys were rotated twice.": ours.rotate(keys[:, :3], 0, theta),
        "These are the values. The cache is (key, value).": values[:, :3],
    }
    check_tensor(f"{case}; keys of the cache", cache[0], keys[:, :3], mistakes)
    mistakes = {"Values are not rotated.": ours.rotate(values[:, :3], 0, theta)}
    check_tensor(f"{case}; values of the cache", cache[1], values[:, :3], mistakes)
    rest = "The cache is right. See to the query, the order of heads, and o_proj."
    check_tensor(case, got, whole[:3], {}, rest)

    given = keys[:, :3].clone(), values[:, :3].clone()
    got, cache = mine.attention(x[3:], w, given, config)
    case = "attention: 2 more tokens, 3 in the cache"
    if given[0].shape[1] == cache[0].shape[1]:
        raise Wrong(f"{case}\nThe new cache has as many tokens as before: 3, and not 5.")
    check_tensor(f"{case}; values of the cache", cache[1], values, {})
    without, (keys_from_0, _) = ours.attention(x[3:], w, None, config)
    mistakes = {
        "The new tokens were rotated from position 0 on. 3 come before them.": (
            torch.cat([keys[:, :3], keys_from_0], 1)
        ),
        "The cached keys were rotated again.": (
            torch.cat([ours.rotate(keys[:, :3], 0, theta), keys[:, 3:]], 1)
        ),
    }
    check_tensor(f"{case}; keys of the cache", cache[0], keys, mistakes)
    check_tensor(case, got, whole[3:], {"The cached tokens were not looked at.": without}, rest)


@step("sampling", "m0_transformer.py", needs_model=True)
def sampling(parts: Parts) -> None:
    """`sample` chooses a token. `uniform` is the random number: on a line of length 1, each token
    has a part as long as its probability, the likeliest first; the part it falls into wins. With
    `top_p` the line ends after the token that reaches it, and `uniform` is a share of that."""
    logits = torch.tensor([0.1, 0.5, 0.05, 0.35]).log() + 3
    for temperature, top_p, uniform, wanted, why in (
        (0.0, 1.0, 0.99, 1, "At temperature 0 it is the likeliest token for every uniform number."),
        (1.0, 1.0, 0.49, 1, "Token 1 has the part from 0 to 0.5."),
        (1.0, 1.0, 0.6, 3, "After token 1, which ends at 0.5, comes token 3, up to 0.85."),
        (1.0, 1.0, 0.99, 2, "With top_p=1 all four count: from 0.95 on it is token 2."),
        (0.5, 1.0, 0.6, 1, "logits / 0.5 squares probabilities: token 1 now ends at 0.658."),
        (2.0, 1.0, 0.45, 3, "At temperature 2 token 1 ends at 0.378, and token 3 at 0.694."),
        (1.0, 0.6, 0.99, 3, "Tokens 1 and 3 are needed to reach 0.6. The others do not count."),
        (1.0, 0.6, 0.55, 1, "With top_p=0.6 the line is 0.85 long: 0.55 of it is 0.47, token 1."),
        (1.0, 0.3, 0.99, 1, "Token 1 alone reaches 0.3: at least one token counts."),
    ):
        given = logits.clone(), temperature, top_p, uniform
        got = parts.module(FILE).sample(*given)
        case = f"sample: probabilities 0.1, 0.5, 0.05, 0.35; {temperature=}, {top_p=}, {uniform=}"
        if not isinstance(got, int):
            raise Wrong(f"{case}\nIt is {got!r}, and should be an int: a token id.")
        if got != wanted:
            raise Wrong(f"{case}\nyours {got}, expected {wanted}. {why}")
        if not torch.equal(given[0], logits):
            raise Wrong(f"{case}\nThe logits have changed; their owner may need them.")


def check_tokens(parts: Parts, name: str, prompts: list[list[int]]) -> None:
    """Greedy tokens of the reader's model are those of Hugging Face's `generate`."""
    from milestone_llm.models.checkpoint import load_model

    theirs, mine = load_model(name, dtype="float32", device="cpu").model, parts.module(FILE)
    model = mine.Model(theirs)
    for prompt in prompts:
        new, caches, output = prompt, None, []
        for _ in range(12):
            logits, caches = model.forward(new, caches)
            new = [mine.sample(logits, 0.0, 1.0, 0.0)]
            output += new
        limits = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        wanted = theirs.generate(torch.tensor([prompt]), **limits)[0, len(prompt) :].tolist()
        if output != wanted:
            raise Wrong(f"{name}, prompt {prompt}:\nyours     {output}\nexpected  {wanted}")


@step("the tokens of Hugging Face", "m0_transformer.py", needs_model=True)
def serves(parts: Parts) -> None:
    """Nothing new to write: a tiny model with random weights gives the same tokens with your
    parts as with Hugging Face's modules, and so does SmolLM2-135M."""
    from milestone_llm.cli import model_libraries

    with model_libraries(num_threads=1):
        check_tokens(parts, "tiny-llama", [[5], [5, 9, 33, 7, 120], list(range(20, 50))])
        check_tokens(parts, "smollm2-135m", [[504, 3575, 282, 4649, 314]])  # The capital of ... is
