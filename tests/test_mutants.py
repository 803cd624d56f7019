"""The list of mistakes for `make mutants` belongs to this code and to these tests."""

import ast

import pytest

from mutants import LIST, ROOT, read_list


@pytest.mark.slow  # it quotes lines, which any renaming changes
def test_each_mistake_can_be_made_and_its_tests_are_there():
    mutants = list(read_list(LIST.read_text(encoding="utf-8")))
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 100
    for mutant in mutants:
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        changed = mutant.in_text(text)
        ast.parse(changed)
        assert changed != text, mutant.name
        missing = [name for name in mutant.tests if not (ROOT / name.split("::")[0]).exists()]
        assert mutant.tests, mutant.name
        assert not missing, mutant.name
