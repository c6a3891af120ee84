"""Anthropic's Messages API: its requests as chats, its events, its answers."""
