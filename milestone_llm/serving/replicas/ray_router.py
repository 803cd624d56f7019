"""Ray Serve asks which replica a request goes to; `Router` answers. Runs in HTTP's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.block_hashes import hash_blocks

from .router import Router


@dataclass(frozen=True)
class Routing:
    """What a router has to know of a request besides the request."""

    policy: str
    num_kv_blocks: int
    """Of one engine."""


class PrefixRouter(RequestRouter):
    """Ray Serve's question which replica gets a request, answered by `Router`."""

    def initialize_state(self, **settings: Any) -> None:
        """For Ray Serve: how a router begins."""
        self._block_size: int = settings["block_size"]
        self._routers: dict[str, Router] = {}
        self._sent: dict[str, tuple[Router, str, int]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """For Ray Serve: the one replica that a request goes to."""
        if pending_request is None or pending_request.metadata.call_method != "generate":
            return [candidate_replicas]
        request, routing = pending_request.args
        router = self._router(routing)
        request_id = pending_request.metadata.internal_request_id
        self._note_end(request_id)  # it is sent again
        params: SamplingParams = request.params
        hashes = hash_blocks(request.prompt_token_ids, self._block_size, params.cache_salt)
        num_tokens = len(request.prompt_token_ids) + params.n * params.max_tokens
        name = router.choose(hashes, num_tokens)
        self._sent[request_id] = router, name, num_tokens
        return [[each for each in candidate_replicas if each.replica_id.unique_id == name]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """For Ray Serve: a call has ended, however."""
        self._note_end(internal_request_id)

    def _note_end(self, request_id: str) -> None:
        if request_id in self._sent:
            router, name, num_tokens = self._sent.pop(request_id)
            router.note_finished(name, num_tokens)

    def _router(self, routing: Routing) -> Router:
        """The router of a policy, told of the replicas that have come and gone."""
        if routing.policy not in self._routers:
            self._routers[routing.policy] = Router(routing.policy, routing.num_kv_blocks)
        router = self._routers[routing.policy]
        there, known = {each.unique_id for each in self.curr_replicas}, set(router.replicas)
        for name in known - there:
            router.remove(name)
        for name in sorted(there - known):
            router.add(name)
        return router
