"""The programs behind the pages do what the pages say of them."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from docs.measured import as_table
from docs.questions import ladder_cpu, m0_transformer
from milestone_llm.models.checkpoint import load_model

ROOT = Path(__file__).parents[2]


@torch.inference_mode()
def test_the_layer_of_m0_gives_hugging_faces_logits_with_and_without_its_cache():
    model = load_model("tiny-llama", dtype="float32", device="cpu").model
    ours, token_ids = m0_transformer.Model(model), [5, 9, 33, 7, 120]
    theirs = model(torch.tensor([token_ids])).logits[0, -1]
    whole, _ = ours.forward(token_ids, None)
    _, caches = ours.forward(token_ids[:3], None)
    in_parts, _ = ours.forward(token_ids[3:], caches)
    torch.testing.assert_close(whole, theirs)
    torch.testing.assert_close(in_parts, theirs)


def test_the_ladder_takes_fewer_steps_or_positions_from_each_milestone_to_the_next(tmp_path):
    record = tmp_path / "ladder.json"
    sizes = ["--model", "tiny-llama", "--num-requests", "6", "--rounds", "1"]
    memory = ["--kv-cache-tokens", "1024", "--max-model-len", "512", "--common-tokens", "32"]
    assert ladder_cpu.main([*sizes, *memory, "--json", str(record)]) == 0
    data = json.loads(record.read_text(encoding="utf-8"))
    medians = [own["median"] for own in data["contestants"].values()]
    steps, positions, rows = (
        [figures[name] for figures in medians] for name in ("num_steps", "positions", "most_rows")
    )
    assert steps[0] > steps[1] > steps[2] >= steps[3]
    assert positions[0] > positions[1] == positions[2] > positions[3]
    assert rows[:2] == [2, 2] < rows[2:]
    assert set(data["same_tokens"].values()) == {6}
    assert "| steps | most rows | positions |" in as_table(data)


COMMAND = re.compile(r"`(?:[A-Z_]+=\S+ )*python -m ([\w.]+)[^`]*`")


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.name)
def test_commands_in_the_text_of_a_page_name_modules_that_exist(page):
    for module in COMMAND.findall(page.read_text(encoding="utf-8")):
        path = ROOT.joinpath(*module.split("."))
        exists = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        assert exists or importlib.util.find_spec(module), f"{page.name}: there is no {module}"
