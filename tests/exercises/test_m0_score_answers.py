"""Checks exercises/m0_score_answers.py."""

import pytest
import torch

from docs.questions.m0_transformer import Model
from helpers.engines import random_prompts, tiny_model

EXERCISE = ("m0_score_answers.py", "score_answers")
PROMPT, *ANSWERS = random_prompts([12, 1, 2, 5, 5])
ANSWERS[3][:2] = ANSWERS[2][:2]  # two answers begin alike
NUM_NEEDED = len(PROMPT) + sum(len(answer) - 1 for answer in ANSWERS)


class CountingModel(Model):
    """A model that counts the positions it computes."""

    num_positions = 0

    def forward(self, token_ids, caches):
        """Logits and caches, as ever."""
        self.num_positions += len(token_ids)
        return super().forward(token_ids, caches)


@torch.inference_mode()
def scored(score_answers):
    """The scores, and how many positions were computed for them."""
    model = CountingModel(tiny_model())
    return score_answers(model, list(PROMPT), [list(a) for a in ANSWERS]), model.num_positions


@torch.inference_mode()
def expected():
    """Scores by Hugging Face's model: a forward pass for each answer."""
    scores = []
    for answer in ANSWERS:
        logits = tiny_model()(torch.tensor([PROMPT + answer])).logits[0].log_softmax(-1)
        steps = enumerate(answer, start=len(PROMPT) - 1)
        scores.append(float(sum(logits[position, token] for position, token in steps)))
    return scores


def without_a_cache(model, prompt, answers):
    scores = []
    for answer in answers:
        score, known = 0.0, list(prompt)
        for token in answer:
            logits, _ = model.forward(known, None)
            score += float(logits.log_softmax(-1)[token])
            known.append(token)
        scores.append(score)
    return scores


WRONG, TOLD = without_a_cache, f"{NUM_NEEDED} are needed: the prompt's 12 once"


def test_scores_are_those_of_hugging_face(exercise):
    scores, _ = scored(exercise)
    assert len(scores) == len(ANSWERS), f"{len(scores)} scores for {len(ANSWERS)} answers"
    for answer, score, wanted in zip(ANSWERS, scores, expected(), strict=True):
        words = "the logits after the prompt hold the log-probability of the answer's first token"
        if len(answer) > 1:
            words = (
                "the answer of one token is right. Does every answer begin with the prompt's "
                "caches, and does each token's log-probability come from the logits before it?"
            )
        assert score == pytest.approx(wanted, abs=1e-4), (
            f"answer {answer}: {score:.4f}, should be {wanted:.4f}: {words}"
        )


def test_no_position_is_computed_twice(exercise, figure):
    number, before = scored(exercise)[1], scored(without_a_cache)[1]
    figure("positions", str(number), f"{before} (no cache)")
    assert number <= NUM_NEEDED, (
        f"{number} positions were computed, {NUM_NEEDED} are needed: the prompt's {len(PROMPT)} "
        "once, and of each answer all but the last token"
    )
