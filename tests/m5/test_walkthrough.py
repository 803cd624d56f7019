from pathlib import Path

import pytest
import torch

from m5_kernels import flash_decode_by_hand as by_hand
from m5_kernels import walkthrough, walkthrough_flash_decode
from m5_kernels.kernels.flash_decode import flash_decode_torch

ROOT = Path(__file__).parents[2]
TRANSCRIPTS = {
    "m5_walkthrough.txt": walkthrough,
    "m5_flash_decode.txt": walkthrough_flash_decode,
}
both = pytest.mark.parametrize("name", TRANSCRIPTS)


def read(name):
    return (ROOT / "docs" / "transcripts" / name).read_text(encoding="utf-8")


@both
def test_walkthrough_fits_the_code_and_its_transcript(name, capsys):
    module = TRANSCRIPTS[name]
    exit_code = module.main(["--auto"])
    captured = capsys.readouterr()
    assert (exit_code, captured.err) == (0, "")
    assert captured.out == read(name), (
        f"python -m {module.__name__} --auto > docs/transcripts/{name}"
    )


@both
def test_transcript_is_80_columns_wide_and_names_no_absolute_path(name):
    text = read(name)
    assert max(map(len, text.splitlines())) <= 80
    assert str(ROOT) not in text
    assert " at 0x" not in text


@both
def test_every_stop_has_a_note_and_something_to_look_at(name):
    for stop in TRANSCRIPTS[name].STOPS:
        assert stop.look, stop.title
        assert stop.commands, stop.title
        assert 1 <= stop.note.count(". ") + 1 <= 4, stop.title


@pytest.mark.parametrize("num_programs", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize("tile", [1, 2, 4])
def test_split_and_merge_by_hand_is_the_kernels_attention(num_programs, tile):
    lens, generator = [9, 1, 30, 4], torch.Generator().manual_seed(1)
    query = torch.ones(4, 1, 1)
    keys = torch.randn(sum(lens), 1, 1, 1, generator=generator)  # a block a token
    values = torch.randn(sum(lens), 1, 1, 1, generator=generator)
    table = torch.zeros(4, max(lens), dtype=torch.int32)
    parts = torch.arange(sum(lens), dtype=torch.int32).split(lens)
    for row, part in zip(table, parts, strict=True):
        row[: len(part)] = part
    expected = flash_decode_torch(query, keys, values, table, torch.tensor(lens), scale=1.0)
    log2_e = by_hand.math.log2(by_hand.math.e)
    scores = [[float(x) * log2_e for x in keys.flatten()[part.long()]] for part in parts]
    numbers = [values.flatten()[part.long()].tolist() for part in parts]
    output = by_hand.flash_decode(scores, numbers, tile, num_programs)
    torch.testing.assert_close(torch.tensor(output), expected.flatten(), rtol=1e-4, atol=1e-5)


def test_shares_cover_every_tile_once_and_differ_by_one_tile_at_most():
    pieces = by_hand.split([10, 3, 0, 7], tile=2, num_programs=5)
    tiles = [(p.seq, tile) for p in pieces for tile in range(p.first_tile, p.end_tile)]
    assert tiles == [(0, i) for i in range(5)] + [(1, 0), (1, 1), (2, 0)] + [
        (3, i) for i in range(4)
    ]
    sizes = [
        sum(p.end_tile - p.first_tile for p in pieces if p.program == program)
        for program in range(5)
    ]
    assert sorted(sizes) == [2, 2, 2, 3, 3]
