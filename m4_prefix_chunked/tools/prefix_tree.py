"""Draws the prefix cache as the tree it is: blocks as nodes, equal beginnings as one trunk.

The cache itself keeps no tree, only names of blocks. A name contains its parent's, so the tree is
found again by walking along the tokens of known requests, those that are finished included.
Neighbouring blocks with the same requests are drawn as one node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from m4_prefix_chunked.prefix_cache import PrefixCache, hash_block
from milestone_llm.engine.request import Request
from milestone_llm.trace.text import Glyphs, fit, fit_list, id_ranges, plural, safe

_NODE_WIDTH = 26


@dataclass
class Node:
    """One block that can be found, or several in a row with the same requests."""

    blocks: list[int]
    token_ids: list[int]
    owners: list[str] = field(default_factory=list)
    """Requests whose block table names these blocks: as many as the reference count says."""
    visitors: list[str] = field(default_factory=list)
    """Requests that begin with these tokens, finished ones included."""
    children: list[Node] = field(default_factory=list)


@dataclass
class PrefixTree:
    """What a prefix cache holds, as far as the given requests lead to it. Counts are blocks."""

    roots: list[Node]
    block_size: int
    num_used: int
    num_cached_free: int
    num_free: int
    """Free ones, cached or not."""
    unnamed: dict[str, list[int]]
    """Blocks in a request's table that cannot be found: not full yet, or a second copy."""

    @classmethod
    def of(cls, kv: PrefixCache, requests: Iterable[Request]) -> PrefixTree:
        """The tree now.

        Args:
            requests: whose tokens to follow; each must have been in the engine.
        """
        owners: dict[int, list[str]] = {}
        for name, table in kv.owners.items():
            for block in table:
                owners.setdefault(block, []).append(name)
        nodes: dict[bytes, Node] = {}
        roots: list[Node] = []
        for request in requests:
            siblings = roots
            for index, block_hash in enumerate(_block_hashes(request, kv.block_size)):
                found = kv.pool.block_of.get(block_hash)
                if found is None:
                    break
                if block_hash not in nodes:
                    first = index * kv.block_size
                    token_ids = request.token_ids[first : first + kv.block_size]
                    nodes[block_hash] = Node([found], token_ids, owners.get(found, []))
                    siblings.append(nodes[block_hash])
                nodes[block_hash].visitors.append(request.request_id)
                siblings = nodes[block_hash].children
        unnamed = {
            name: [block for block in table if block not in kv.pool.hash_of]
            for name, table in kv.owners.items()
        }
        return cls(
            roots=[_collapse(root) for root in roots],
            block_size=kv.block_size,
            num_used=kv.pool.num_used,
            num_cached_free=kv.pool.num_cached_free,
            num_free=kv.pool.num_free,
            unnamed={name: blocks for name, blocks in unnamed.items() if blocks},
        )


def _block_hashes(request: Request, block_size: int) -> Iterator[bytes]:
    """Hashes of a request's full blocks, each chained to the one before."""
    salt = request.sampling_params.cache_salt
    block_hash = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
    for first in range(0, request.num_tokens - block_size + 1, block_size):
        block_hash = hash_block(block_hash, request.token_ids[first : first + block_size])
        yield block_hash


def _collapse(node: Node) -> Node:
    """Merge a node with its only child as long as the same requests own and visit both."""
    while len(node.children) == 1:
        (child,) = node.children
        if (child.owners, child.visitors) != (node.owners, node.visitors):
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
    glyphs = Glyphs.of(console)
    used, cached, _ = glyphs.bar
    console.print(
        f"blocks of {tree.block_size} tokens: {used} {tree.num_used} in use, "
        f"{cached} {tree.num_cached_free} free but cached, "
        f"{tree.num_free - tree.num_cached_free} free",
        soft_wrap=True,
    )
    for root in tree.roots:
        _print_node(root, console, decode, glyphs, lead="", branch="", is_last=True)
    if tree.unnamed:
        words = [f"{name} {' '.join(id_ranges(each))}" for name, each in tree.unnamed.items()]
        text = "no name yet (not full): "
        text += " | ".join(fit_list(words, console.width - len(text) - 2 * len(words), glyphs))
        console.print(Text(fit(text, console.width, glyphs), "dim"), soft_wrap=True)


def _print_node(
    node: Node,
    console: Console,
    decode: Callable[[list[int]], str] | None,
    glyphs: Glyphs,
    *,
    lead: str,
    branch: str,
    is_last: bool,
) -> None:
    """A node and what is below it; `lead` stands before all of its lines but the first."""
    width = console.width
    sign = glyphs.bar[0] if node.owners else glyphs.bar[1]
    head = f"{lead}{branch}{sign} {_blocks(node, glyphs)}".ljust(_NODE_WIDTH)
    line = Text(head).append(f"  {_who(node, width - len(head) - 2, glyphs)}")
    console.print(line, soft_wrap=True)
    pipe, fork, corner = ("|", "|-", "`-") if glyphs.ascii_only else ("│", "├─", "└─")
    below = lead + ("" if not branch else "  " if is_last else f"{pipe} ")
    text = decode(node.token_ids) if decode else " ".join(map(str, node.token_ids))
    stem = f"{below}{pipe if node.children else ' '} "
    quoted = safe(" ".join(text.split()), glyphs)
    console.print(Text(stem + fit(quoted, width - len(stem), glyphs), "dim"), soft_wrap=True)
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        _print_node(
            child,
            console,
            decode,
            glyphs,
            lead=below,
            branch=corner if last else fork,
            is_last=last,
        )


def _blocks(node: Node, glyphs: Glyphs) -> str:
    ids = " ".join(fit_list(id_ranges(node.blocks), _NODE_WIDTH - 14, glyphs))
    return f"{plural(len(node.blocks), 'block')}: {ids}"


def _who(node: Node, space: int, glyphs: Glyphs) -> str:
    """Reference count and owners, or whose blocks these were."""
    label, names = f"refs {len(node.owners)}: ", node.owners
    if not names:
        label, names = "refs 0, cached, was of ", node.visitors
    return label + " ".join(fit_list([safe(n, glyphs) for n in names], space - len(label), glyphs))
