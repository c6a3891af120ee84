"""Chats: their messages, the tools in them, and the model's template that makes text of both."""
