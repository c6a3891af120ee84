"""OpenAI's Responses API, without any state on the server: its items, its events, its answers."""
