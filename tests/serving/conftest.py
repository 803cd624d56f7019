"""Servers that several tests share. Each is started when a test first asks for it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from helpers import forked
from helpers.servers import save_tiny_model, serve
from m3_paged import LLMEngine
from milestone_llm import MILESTONES

ROOM = ("--max-num-seqs", "4", "--max-model-len", "256")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Save a tiny model with a tokenizer."""
    forked.start_importing()  # while the model is made
    return save_tiny_model(tmp_path_factory.mktemp("served") / "tiny-bytes")


@pytest.fixture(scope="session")
def servers(model_folder, tmp_path_factory):
    """Return a server of each milestone, by name, for those that a test has asked for."""
    logs = tmp_path_factory.mktemp("logs")
    running = {}
    with contextlib.ExitStack() as stack:

        def server_of(milestone):
            if milestone not in running:
                log = logs / f"{milestone}.log"
                server = serve(milestone, model_folder, log, *ROOM, "--check-invariants")
                running[milestone] = stack.enter_context(server)
            return running[milestone]

        yield server_of


@pytest.fixture(params=MILESTONES)
def server(request, servers):
    """Return a server of every milestone, one after the other."""
    return servers(request.param)


@pytest.fixture
def m4(servers):
    """Return a server of M4, for tests in which the milestone does not matter."""
    return servers("m4_prefix_chunked")


@pytest.fixture(scope="session")
def roomy(model_folder, tmp_path_factory):
    """Start M4 with room for tools in the system message: each byte is a token."""
    log = tmp_path_factory.mktemp("roomy") / "log"
    room = "--max-num-seqs", "4", "--max-model-len", "1024"
    with serve("m4_prefix_chunked", model_folder, log, *room, "--check-invariants") as server:
        yield server


@pytest.fixture(scope="session")
def oracle(model_folder):
    """Return an engine on the same model, with the expected answers."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the servers compute at the same time
    yield LLMEngine(str(model_folder), max_num_seqs=4, max_model_len=256, device="cpu")
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def slow(model_folder, tmp_path_factory):
    """Start M4 with steps of 20 ms, two rows, 4 tokens a step, and room for two waiting
    requests."""
    log = tmp_path_factory.mktemp("slow") / "log"
    limits = ("--max-num-seqs", "2", "--max-num-batched-tokens", "4", "--max-model-len", "1024")
    queue = ("--max-queued", "2", "--max-body-bytes", "100000")
    with serve(
        "m4_prefix_chunked", model_folder, log, *limits, *queue, step_seconds=0.02
    ) as server:
        yield server
