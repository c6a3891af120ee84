"""One model on one rank: token ids in, token ids and numbers out."""
