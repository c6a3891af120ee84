"""The decode pool: receives KV, streams tokens."""
