"""Sizes of a load on GPUs: the book's page and the program compute the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from milestone_llm.core.errors import InputError
from milestone_llm.lab.playground.gpus import GPUS, MODELS, machine_named
from milestone_llm.lab.playground.machine import MACHINES
from milestone_llm.lab.playground.service import Playground
from milestone_llm.lab.playground.setting import Setting
from milestone_llm.lab.playground.simulate import run_setting
from milestone_llm.lab.playground.sizing import Load, main, page_data, run, setting_of, size

SCRIPT = Path(__file__).parents[2] / "docs/book/sizing.js"
LOADS = [
    Load(),
    Load("llama-3.3-70b", 1, 1, 512, 64, 256),
    Load("qwen3-32b", 0.5625, 2, 4096, 2048, 7),
    Load("qwen3-0.6b", 2, 1, 64, 16, 1),
]


@pytest.mark.skipif(not shutil.which("node"), reason="needs Node")
def test_the_page_computes_what_the_program_computes():
    program = f"{SCRIPT.read_text('utf-8')}\nconst [data, loads] = JSON.parse(process.argv[1]);"
    program += "console.log(JSON.stringify(loads.map((load) => sizes(data, load))));"
    given = json.dumps([page_data(), [asdict(load) for load in LOADS]])
    told = subprocess.run(
        ["node", "-e", program, given], capture_output=True, text=True, check=True
    )
    for load, found in zip(LOADS, json.loads(told.stdout), strict=True):
        for gpu, page in zip(GPUS, found, strict=True):
            assert page.pop("gpu") == gpu
            ours = asdict(size(gpu, load))
            assert page == pytest.approx({name: ours[name] for name in page}, rel=1e-12)
            assert len(page) == len(ours) - 1


def test_the_measured_machine_is_one_of_them():
    """The H200 with Qwen3-0.6B's shape is the playground's own."""
    ours, measured = machine_named("h200 qwen3-0.6b 2 2"), MACHINES["h200"]
    for name in ("layer_weights", "head_weights", "query_size", "kv_bytes", "overhead_s"):
        assert getattr(ours, name) == getattr(measured, name), name
    assert (ours.memory, ours.arithmetic) == pytest.approx((measured.memory, measured.arithmetic))


@pytest.mark.parametrize(
    ("model", "billions"), zip(MODELS, (0.6, 8.03, 8.19, 32.8, 70.6), strict=True)
)
def test_a_shape_has_as_many_weights_as_its_name_says(model, billions):
    assert MODELS[model].weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_step_of_a_lone_request_is_the_schedulers_too():
    """TTFT alone and TPOT of one row are what M4's scheduler gives a request that is alone."""
    load = Load("qwen3-8b", prompt=256, output=64, rows=1)
    setting = setting_of("h100", load, 1)
    lone = Setting(setting.requests[:1], setting.sides, setting.machine)
    figures, found = run_setting(lone)[0].figures, size("h100", load)
    assert figures["ttft"] == pytest.approx(found.ttft, rel=1e-3)
    assert figures["tpot"] / 1e3 == pytest.approx(found.tpot, rel=1e-3)


def test_the_queue_grows_where_more_come_than_are_served():
    load = Load(prompt=512, output=64)
    rate = size("l4", load).requests
    assert run("l4", load, 3 * rate)["ttft"] > 20 * run("l4", load, rate / 3)["ttft"]


def test_what_has_no_room_says_so(capsys):
    load = Load("llama-3.3-70b")
    assert (size("l4", load).rows, run("l4", load, 1)) == (0, {})
    assert main(["--model", "llama-3.3-70b"]) == 0
    assert capsys.readouterr().out.count("too little memory") == len(GPUS) - 1
    assert main(["--rows", "0"]) == 2


def test_the_page_gets_figures_and_a_link_to_the_run():
    data = {"gpu": "h100", "rate": 4, "load": asdict(Load(prompt=64, output=16))}
    found = json.loads(Playground().answers["/sizing"](data))
    setting = Setting.of(found["link"])
    assert run_setting(setting)[0].figures == pytest.approx(found["figures"])
    with pytest.raises(InputError, match="machine must be one of laptop, h200"):
        machine_named("h100 gpt-2")
