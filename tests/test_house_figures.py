"""`make figures` counts code, and not what is said about it."""

from __future__ import annotations

from house_figures import function_lines, names_in_code


def test_an_extra_is_named_by_code_and_not_by_what_is_said_about_it(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        '"""Of hopper."""\n'
        "from m5_kernels.extras.devices import cpu_ops  # hopper\n"
        "def choose(ranks, kind='int8'):\n"
        "    raise ValueError(f'no hopper {ranks.guesses}')\n"
    )
    wanted = {
        "m5_kernels.extras.devices.cpu_ops",
        "cpu_ops",
        "choose",
        "ranks",
        "kind",
        "int8",
        ".guesses",
    }
    assert names_in_code(path) == wanted | {"ValueError"}


def test_a_kernel_is_no_long_function(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        "@triton.jit(do_not_specialize=['n'])\ndef kernel(n):\n    pass\n    pass\n\n\n"
        "class Engine:\n    @property\n    def step(self):\n        return 1\n"
    )
    assert list(function_lines(path)) == [(2, "Engine.step")]
