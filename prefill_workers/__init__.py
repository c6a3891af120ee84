"""The prefill pool: computes a prompt's KV and hands it over."""
