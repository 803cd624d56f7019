from __future__ import annotations


def allowed_tokens(choices, texts, eos_token_id, output_token_ids):
    output = "".join(texts[token_id] for token_id in output_token_ids)
    allowed = {
        token_id
        for token_id, text in enumerate(texts)
        if token_id != eos_token_id
        and text
        and any(choice.startswith(output + text) for choice in choices)
    }
    return allowed | {eos_token_id} if output in choices else allowed
