"""Programs that measure. torch is imported after the ground floor, which its threads obey."""

import milestone_llm  # noqa: F401
