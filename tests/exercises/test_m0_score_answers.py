"""Checks exercises/m0_score_answers.py."""

import pytest
import torch

from docs.questions.m0_transformer import Model
from engine_helpers import random_prompts, tiny_model

EXERCISE = ("m0_score_answers.py", "score_answers")
PROMPT, *ANSWERS = random_prompts([12, 1, 2, 5, 5])
ANSWERS[3][:2] = ANSWERS[2][:2]  # two answers begin alike


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


def check_scores(score_answers):
    scores, _ = scored(score_answers)
    assert len(scores) == len(ANSWERS), f"{len(scores)} scores for {len(ANSWERS)} answers"
    for answer, score, wanted in zip(ANSWERS, scores, expected(), strict=True):
        if score == pytest.approx(wanted, abs=1e-4):
            continue
        words = "the logits after the prompt hold the log-probability of the answer's first token"
        if len(answer) > 1:
            words = (
                "the answer of one token is right. Does every answer begin with the prompt's "
                "caches, and does each token's log-probability come from the logits before it?"
            )
        raise AssertionError(f"answer {answer}: {score:.4f}, should be {wanted:.4f}: {words}")


NUM_NEEDED = len(PROMPT) + sum(len(answer) - 1 for answer in ANSWERS)


def check_positions(score_answers):
    _, number = scored(score_answers)
    assert number <= NUM_NEEDED, (
        f"{number} positions were computed, {NUM_NEEDED} are needed: the prompt's {len(PROMPT)} "
        "once, and of each answer all but the last token"
    )


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


def one_cache_for_all(model, prompt, answers):
    logits, caches = model.forward(prompt, None)
    scores = []
    for answer in answers:
        score = 0.0
        for token in answer:
            score += float(logits.log_softmax(-1)[token])
            logits, caches = model.forward([token], caches)
        scores.append(score)
    return scores


def test_scores_are_those_of_hugging_face(exercise):
    check_scores(exercise)


def test_no_position_is_computed_twice(exercise, figure):
    figure("positions", str(scored(exercise)[1]), f"{scored(without_a_cache)[1]} (no cache)")
    check_positions(exercise)


def test_an_answer_on_top_of_another_is_told():
    with pytest.raises(AssertionError, match="Does every answer begin with the prompt's caches"):
        check_scores(one_cache_for_all)


def test_probabilities_in_place_of_logarithms_are_told():
    def products(model, prompt, answers):
        logits, _ = model.forward(prompt, None)
        return [float(logits.softmax(-1)[answer[0]]) for answer in answers]

    with pytest.raises(AssertionError, match="log-probability of the answer's first token"):
        check_scores(products)


def test_positions_computed_again_are_told():
    check_scores(without_a_cache)
    with pytest.raises(AssertionError, match=f"{NUM_NEEDED} are needed: the prompt's 12 once"):
        check_positions(without_a_cache)
