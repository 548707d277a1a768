"""A client for verl's agent loops that needs no GPU: a tiny transformers model with the interface of verl's own client,
and the fields that its vLLM server fills in."""

import math
from functools import cache

import torch
from transformers import AutoModelForCausalLM


@cache
def model_in(folder, scale):
    """The model, once for each process; `scale` makes another policy of it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale)
    return model


class TinyClient:
    """`generate` of verl's LLMServerClient. max_model_len is checked as its server does."""

    def __init__(self, folder, max_model_len, scale=1.0):
        self.folder, self.max_model_len, self.scale = folder, max_model_len, scale

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        from verl.workers.rollout.replica import TokenOutput

        left = self.max_model_len - len(prompt_ids)
        if left < 1:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room")
        model, tokens, logprobs = model_in(self.folder, self.scale), list(prompt_ids), []
        bias = sampling_params.get("logit_bias", {})
        fields = {}
        if (top := sampling_params.get("prompt_logprobs")) is not None:
            fields = self._scores(model, tokens, top)
        for _token in range(max(1, min(sampling_params["max_tokens"], left))):
            scores = self._logits(model, tokens)[-1]
            for token, value in bias.items():
                scores[token] += value
            token = int(torch.multinomial(scores.softmax(-1), 1))
            logprobs.append(float(scores.log_softmax(-1)[token]))
            tokens.append(token)
            if token == model.config.eos_token_id:
                break
        wanted = bool(sampling_params.get("logprobs"))
        new = tokens[len(prompt_ids) :]
        return TokenOutput(token_ids=new, log_probs=logprobs if wanted else None, extra_fields=fields)

    @torch.no_grad()
    def _logits(self, model, tokens):
        logits = model(torch.tensor([tokens])).logits[0].double()
        return logits

    def _scores(self, model, tokens, top):
        """As verl's `extract_prompt_logprobs`: entry i is about token i + 1, the last one is padding."""
        places = self._logits(model, tokens).log_softmax(-1)[:-1]
        if top:
            best = places.topk(top)
            ids, values = best.indices.tolist(), best.values.tolist()
        else:
            ids = [[token] for token in tokens[1:]]
            values = [[float(place[token])] for place, token in zip(places, tokens[1:], strict=True)]
        assert all(math.isfinite(value) for place in values for value in place)
        pad = max(top, 1)
        return {"prompt_ids": [*ids, [0] * pad], "prompt_logprobs": [*values, [0.0] * pad]}
