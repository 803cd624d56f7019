"""The code of the vector addition, as it runs."""

from pathlib import Path

text = Path(__file__).with_name("compute_vector_add.py").read_text(encoding="utf-8")
print(text[text.index("@triton.jit") :].rstrip())
