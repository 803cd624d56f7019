"""Ray Serve's router interface, implemented with `Router`. Runs in HTTP's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from milestone_llm.core.block_hashes import hash_blocks

from .router import Router


@dataclass(frozen=True)
class Routing:
    """What a router has to know in addition to a request."""

    num_kv_blocks: int
    """KV blocks of one engine."""
    num_tokens: int
    """Tokens of the request: its prompt's, and those it may generate."""


class PrefixRouter(RequestRouter):
    """Chooses the replica for a request, as Ray Serve asks, with `Router`."""

    def initialize_state(self, **settings: Any) -> None:
        """Set up the router. For Ray Serve."""
        self._block_size: int = settings["block_size"]
        self._router: Router | None = None
        self._sent: dict[str, tuple[str, int]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the one replica that a request goes to. For Ray Serve."""
        if pending_request is None or pending_request.metadata.call_method != "generate":
            return [candidate_replicas]
        request, routing = pending_request.args
        if self._router is None:
            self._router = Router(max_blocks=routing.num_kv_blocks)
        self._follow_replicas(self._router)
        request_id = pending_request.metadata.internal_request_id
        self._note_end(request_id)  # if it is sent again
        salt = request.params.cache_salt
        hashes = hash_blocks(request.prompt_token_ids, self._block_size, salt)
        name = self._router.choose(hashes, routing.num_tokens)
        self._sent[request_id] = name, routing.num_tokens
        return [[each for each in candidate_replicas if each.replica_id.unique_id == name]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a call has ended, for any reason. For Ray Serve."""
        self._note_end(internal_request_id)

    def _note_end(self, request_id: str) -> None:
        if self._router is not None and request_id in self._sent:
            self._router.note_finished(*self._sent.pop(request_id))

    def _follow_replicas(self, router: Router) -> None:
        """Tell the router which replicas have come and gone."""
        there, known = {each.unique_id for each in self.curr_replicas}, set(router.replicas)
        for name in known - there:
            router.remove(name)
        for name in sorted(there - known):
            router.add(name)
