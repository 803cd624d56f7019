"""M0: which answer does the model find most likely? Compute the prompt once.

Multiple-choice benchmarks are scored like this: an answer's score is the sum of the
log-probabilities of its tokens, each given the prompt and the answer's tokens before it.

    prompt   The sky is       its keys and values: computed once
    answers  blue .           log p(blue | The sky is) + log p(. | The sky is blue)
             made of cheese   log p(made | The sky is) + log p(of | The sky is made) + ...

`model` is that of docs/questions/m0_transformer.py. `model.forward(token_ids, caches)` computes new
tokens after those in the caches (None: there are none). It returns the logits `[vocab_size]` after
the last new token, and new caches; it does not change the caches that it was given.

1. The scores are right.
2. No position is computed twice, and none is wasted: the prompt once, and of each answer all tokens
   except the last, since nothing after it is needed.

    python -m pytest tests/exercises/test_m0_score_answers.py
"""

from __future__ import annotations

from docs.questions.m0_transformer import Model


def score_answers(model: Model, prompt: list[int], answers: list[list[int]]) -> list[float]:
    """Return the score of each answer, a natural logarithm.

    Hint: one call for the prompt; its logits hold the log-probability of every answer's first token
    (`logits.log_softmax(-1)`). Then token by token, each answer from the prompt's caches on.
    """
    raise NotImplementedError
