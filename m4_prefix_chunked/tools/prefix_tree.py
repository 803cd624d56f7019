"""Draws the prefix cache as the tree it is: blocks as nodes, equal beginnings as one trunk.

The cache itself keeps no tree, only names of blocks. A name contains its parent's. So the tree is
found again by walking along the tokens of known requests, finished ones included.
Neighbouring blocks with the same requests are drawn as one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.text import Text
from rich.tree import Tree

from m4_prefix_chunked.prefix_cache import PrefixCache
from milestone_llm.core.block_hashes import hash_blocks
from milestone_llm.core.request import Request
from milestone_llm.trace.text import BAR, Words, fit, id_ranges, plural, print_lines, safe

_USED, _CACHED = BAR[0], BAR[1]


@dataclass
class Node:
    """One block that can be found, or several in a row with the same requests."""

    blocks: list[int]
    token_ids: list[int]
    holders: list[str] = field(default_factory=list)
    """Requests whose block table names these blocks: as many as the reference count says."""
    visitors: list[str] = field(default_factory=list)
    """Requests that begin with these tokens, finished ones included."""
    children: list[Node] = field(default_factory=list)


def prefix_tree(cache: PrefixCache, requests: Iterable[Request]) -> list[Node]:
    """Return the roots of a prefix cache's tree, as far as the given requests lead to its blocks.

    Args:
        requests: requests whose tokens to follow; each must have been in the engine.
    """
    size, nodes, roots = cache.kv.block_size, dict[bytes, Node](), list[Node]()
    for request in requests:
        siblings, salt = roots, request.sampling_params.cache_salt
        for index, block_hash in enumerate(hash_blocks(request.token_ids, size, salt)):
            block = cache.pool.block_of.get(block_hash)
            if block is None:
                break
            if block_hash not in nodes:
                token_ids = request.token_ids[index * size : (index + 1) * size]
                tables = cache.kv.block_tables.items()
                holders = [name for name, table in tables if block in table]
                nodes[block_hash] = Node([block], token_ids, holders)
                siblings.append(nodes[block_hash])
            nodes[block_hash].visitors.append(request.request_id)
            siblings = nodes[block_hash].children
    return [_collapse(root) for root in roots]


def _collapse(node: Node) -> Node:
    """Merge a node with its only child as long as the same requests hold and visit both."""
    while len(node.children) == 1:
        (child,) = node.children
        if (child.holders, child.visitors) != (node.holders, node.visitors):
            break
        node.blocks += child.blocks
        node.token_ids += child.token_ids
        node.children = child.children
    node.children = [_collapse(child) for child in node.children]
    return node


def pool_in_words(cache: PrefixCache) -> str:
    """Return the state of the cache's blocks in words, with the signs of the tree."""
    pool, size = cache.pool, cache.kv.block_size
    num_free = pool.num_free - pool.num_cached_free
    return (
        f"blocks of {size} tokens: {_USED} {pool.num_used} in use, "
        f"{_CACHED} {pool.num_cached_free} free but cached, {num_free} free"
    )


def print_prefix_tree(
    roots: list[Node],
    pool: str,
    console: Console,
    decode: Callable[[list[int]], str] | None = None,
) -> None:
    """Print the pool in words, and the tree, two lines a node.

    Args:
        decode: makes text of token ids; without it the ids themselves are shown.
    """

    def add(parent: Tree, node: Node, space: int) -> None:
        """Add a node, in two lines of `space` cells, and the nodes below it."""
        blocks = Words(id_ranges(node.blocks), f"{plural(len(node.blocks), 'block')}: ")
        names, refs = node.holders, f"refs {len(node.holders)}: "
        if not names:
            names, refs = node.visitors, "refs 0, cached, was of "
        sign = _USED if node.holders else _CACHED
        head = f"{sign} {blocks.line(24).plain}  ".ljust(space - console.width + 28)
        who = Words([safe(name) for name in names], head + refs)
        text = decode(node.token_ids) if decode else " ".join(map(str, node.token_ids))
        text = fit(safe(" ".join(text.split())), space - 2)
        branch = parent.add(Group(who.line(space), Text(f"  {text}", "dim")), guide_style="")
        for child in node.children:
            add(branch, child, space - 4)

    forest = Tree("", hide_root=True)
    for root in roots:
        add(forest, root, console.width)
    print_lines(console, Group(Text(pool), forest))
