from pathlib import Path

from m3_paged import walkthrough

ROOT = Path(__file__).parents[2]
TRANSCRIPT = ROOT / "docs" / "transcripts" / "m3_walkthrough.txt"


def test_walkthrough_fits_the_code_and_its_transcript(capsys):
    exit_code = walkthrough.main(["--auto"])
    captured = capsys.readouterr()
    assert (exit_code, captured.err) == (0, "")
    assert captured.out == TRANSCRIPT.read_text(encoding="utf-8"), (
        "python -m m3_paged.walkthrough --auto > docs/transcripts/m3_walkthrough.txt"
    )


def test_transcript_is_80_columns_wide_and_names_no_absolute_path():
    text = TRANSCRIPT.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 80
    assert str(ROOT) not in text
    assert " at 0x" not in text


def test_every_stop_has_a_note_and_something_to_look_at():
    for stop in walkthrough.STOPS:
        assert stop.look, stop.title
        assert stop.commands, stop.title
        assert 1 <= stop.note.count(". ") + 1 <= 4, stop.title
