"""Draws the prefix cache as the tree it is: blocks as nodes, equal beginnings as one trunk.

The cache itself keeps no tree, only names of blocks. A name contains its parent's, so the tree is
found again by walking along the tokens of known requests, those that are finished included.
Neighbouring blocks with the same requests are drawn as one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.text import Text
from rich.tree import Tree

from m4_prefix_chunked.prefix_cache import PrefixCache
from milestone_llm.core.request import Request
from milestone_llm.frontend.block_hashes import hash_blocks
from milestone_llm.trace.text import BAR, Words, fit, id_ranges, plural, print_lines, safe


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


@dataclass
class PrefixTree:
    """The content of a prefix cache, as far as the given requests lead to it. Counts are blocks."""

    roots: list[Node]
    block_size: int
    num_used: int
    num_cached_free: int
    num_free: int
    """Free ones, cached or not."""

    @classmethod
    def of(cls, cache: PrefixCache, requests: Iterable[Request]) -> PrefixTree:
        """The tree now.

        Args:
            requests: whose tokens to follow; each must have been in the engine.
        """
        block_tables: Mapping[str, Sequence[int]] = cache.kv.block_tables
        pool, size = cache.pool, cache.kv.block_size
        nodes: dict[bytes, Node] = {}
        roots: list[Node] = []
        for request in requests:
            siblings = roots
            salt = request.sampling_params.cache_salt
            for index, block_hash in enumerate(hash_blocks(request.token_ids, size, salt)):
                block = pool.block_of.get(block_hash)
                if block is None:
                    break
                if block_hash not in nodes:
                    token_ids = request.token_ids[index * size : (index + 1) * size]
                    holders = [name for name, table in block_tables.items() if block in table]
                    nodes[block_hash] = Node([block], token_ids, holders)
                    siblings.append(nodes[block_hash])
                nodes[block_hash].visitors.append(request.request_id)
                siblings = nodes[block_hash].children
        return cls(
            roots=[_collapse(root) for root in roots],
            block_size=size,
            num_used=pool.num_used,
            num_cached_free=pool.num_cached_free,
            num_free=pool.num_free,
        )


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


def print_prefix_tree(
    tree: PrefixTree, console: Console, decode: Callable[[list[int]], str] | None = None
) -> None:
    """Print a tree, two lines a node.

    Args:
        decode: text of token ids; without it the ids themselves are shown.
    """
    used, cached = BAR[0], BAR[1]

    def add(parent: Tree, node: Node, space: int) -> None:
        """A node, in two lines of `space` cells, and what is below it."""
        blocks = Words(id_ranges(node.blocks), f"{plural(len(node.blocks), 'block')}: ")
        names, refs = node.holders, f"refs {len(node.holders)}: "
        if not names:
            names, refs = node.visitors, "refs 0, cached, was of "
        sign = used if node.holders else cached
        head = f"{sign} {blocks.line(24).plain}  ".ljust(space - console.width + 28)
        who = Words([safe(name) for name in names], head + refs)
        text = decode(node.token_ids) if decode else " ".join(map(str, node.token_ids))
        text = fit(safe(" ".join(text.split())), space - 2)
        branch = parent.add(Group(who.line(space), Text(f"  {text}", "dim")), guide_style="")
        for child in node.children:
            add(branch, child, space - 4)

    forest = Tree("", hide_root=True)
    for root in tree.roots:
        add(forest, root, console.width)
    head = (
        f"blocks of {tree.block_size} tokens: {used} {tree.num_used} in use, "
        f"{cached} {tree.num_cached_free} free but cached, "
        f"{tree.num_free - tree.num_cached_free} free"
    )
    print_lines(console, Group(Text(head), forest))
