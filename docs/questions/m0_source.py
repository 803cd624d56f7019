"""The code of one layer, as it runs: `layer` of m0_transformer.py."""

import inspect

from docs.questions import m0_transformer

print(inspect.getsource(m0_transformer.layer).rstrip())
