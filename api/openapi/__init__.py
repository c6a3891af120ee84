"""What the HTTP API is, written down once: the OpenAPI document, its page and docs/api.md."""
