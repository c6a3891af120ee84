"""A load on any OpenAI-compatible server, what it took, and whether a contract was met."""
