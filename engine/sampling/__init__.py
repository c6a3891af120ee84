"""From logits to one token per row; one file for each thing that has a say in it.

    model's logits [rows, vocab]
      -> logprobs.py    what the client is told, before anything below has touched them
      -> masks.py       tokens that may come at all: allowed_token_ids, grammar_masks.py
      -> bans.py        tokens that may not come now: min_tokens, bad words
      -> bias.py        logit_bias
      -> penalties.py   repetition, presence, frequency
      -> candidates.py  temperature, top-k, top-p, min-p and the draw, among the likeliest tokens
      -> filters.py     the same filters over all tokens, where those do not decide
      -> draw.py        one stateless random number for each row

`rows.py` says what one row needs, `sampler.py` runs the stages that some row of the batch wants.
"""
