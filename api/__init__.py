"""The faces: HTTP and public gRPC, text to token ids and back."""
