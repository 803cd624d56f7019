"""A solution of exercises/m0_score_answers.py."""

from __future__ import annotations

from docs.questions.m0_transformer import Model


def score_answers(model: Model, prompt: list[int], answers: list[list[int]]) -> list[float]:
    """The score of each answer, a natural logarithm."""
    logits_of_prompt, caches_of_prompt = model.forward(prompt, None)
    scores = []
    for answer in answers:
        logits, caches, score = logits_of_prompt, caches_of_prompt, 0.0
        for index, token_id in enumerate(answer):
            score += float(logits.log_softmax(-1)[token_id])
            if index + 1 < len(answer):
                logits, caches = model.forward([token_id], caches)
        scores.append(score)
    return scores
