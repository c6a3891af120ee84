"""OpenAI's two text APIs: their fields, their requests, the shapes of their answers."""
